"""TorchRunner: plays StepPlans on a decoder. The engine submits plans; it decides nothing itself.

One step is: apply the plan's changes, one forward pass over all its tokens, draw. With `overlap` a worker
thread does this while the caller plans the next step; the order of plans is kept either way.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from cumulo.base.machine import PeakMemory
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import NewSlot, Send, StepPlan, StepResult
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.play.drafter import Drafter
from cumulo.engine.play.rank_play import RankPlay
from cumulo.engine.play.slot_table import SlotTable, StepRows
from cumulo.engine.play.swap_pool import SwapPool, swap_blocks
from cumulo.engine.play.verify import StepDraws, draws_of, take_accepted, write_drafts
from cumulo.engine.sampling.distribution import Ints
from cumulo.engine.sampling.sampler import draw
from cumulo.kernels.cpu.paged_attention import bytes_of
from cumulo.models.adapters.bank import AdapterBank
from cumulo.models.adapters.files import AdapterWeights
from cumulo.models.batch import KVCache, RunnableModel

# From the rows of a step that other engines wait for to what is called after each of its layers.
LayerTeller = Callable[[list[Send]], Callable[[int], None]]


class TorchRunner:
    def __init__(
        self,
        model: RunnableModel,
        cache: KVCache,
        *,
        max_slots: int,
        max_context: int,
        eos_token_ids: Sequence[int] = (),
        host_blocks: int = 0,
        overlap: bool = False,
        threads: int | None = None,
        guidance: Guidance | None = None,
        rank: RankPlay | None = None,
        bank: AdapterBank | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`rank`: this runner is one of several that play every plan together."""
        self.model, self.cache = model, cache
        self.rank, self.drafter = rank, drafter
        self.device = cache.key_storage.device
        self.table = SlotTable(max_slots, max_context, cache.block_size, eos_token_ids, guidance)
        self.pool = SwapPool(cache, host_blocks) if host_blocks else None
        self.bank, self.table.serves_adapters = bank, bank is not None
        self.layer_teller: LayerTeller | None = None  # who is told of rows that other engines wait for
        self._closed = False
        self._worker: ThreadPoolExecutor | None = None
        if overlap:
            # torch keeps a thread count per calling thread, so the worker sets its own.
            count = threads or torch.get_num_threads()
            self._worker = ThreadPoolExecutor(
                max_workers=1,
                thread_name_prefix="cumulo-runner",
                initializer=torch.set_num_threads,
                initargs=(count,),
            )
        elif threads is not None:
            torch.set_num_threads(threads)

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Execute the plan, now or in the worker thread; what goes wrong is raised by `.result()`."""
        if self._closed:
            raise RuntimeError("this runner was closed; no more steps can be submitted")
        if self._worker is not None:
            return self._worker.submit(self._execute, plan)
        done: Future[StepResult] = Future()
        try:
            done.set_result(self._execute(plan))
        except Exception as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Finish what was submitted and stop the worker."""
        self._closed = True
        if self._worker is not None:
            self._worker.shutdown(wait=True)

    def memory_bytes(self) -> dict[str, int]:
        """What this runner holds, by the names of the memory ledger's rows."""
        held = {"weights": self.model.weight_bytes, "kv cache": self.cache.nbytes}
        if self.bank is not None:
            held["adapters"] = self.bank.nbytes
        if self.device.type != "cpu":  # tables and host tier are the host's, the ledger is the device's
            return held
        held["token tables"] = self.table.nbytes
        if self.drafter is not None:
            held |= self.drafter.memory_bytes()
        if self.pool is not None:
            held["host tier"] = self.pool.nbytes
        return held

    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Nothing to make: torch's operators are compiled already."""

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Into a slot that no sequence of a plan to come refers to before the caller says so."""
        assert self.bank is not None
        self.bank.install(slot, weights)

    def measure_step(self, tokens: int, draws: int) -> int | None:
        """Peak memory of a step of this size beyond what is held: the ledger's activations and logits.

        For an idle runner only, best before its first step: it computes nonsense into the first blocks.
        """
        rows = max(1, draws)
        counts = [tokens // rows + (row < tokens % rows) for row in range(rows)]
        slots = list(range(rows))
        plan = StepPlan(-1, slots=slots, starts=[0] * rows, counts=counts)
        for slot, count in zip(slots, counts, strict=True):
            blocks = [index % self.cache.blocks for index in range(-(-count // self.cache.block_size))]
            plan.begin.append(NewSlot(slot, [0] * count, count, blocks, SamplingParams(top_p=0.9), 0))
        plan.draw_rows = plan.draw_slots = slots[:draws]
        touched = {block for new in plan.begin for block in new.blocks}
        for storage in (self.cache.key_storage, self.cache.value_storage):
            bytes_of(storage)[:, sorted(touched)] = 0  # commits the cache's pages: they are not this step's
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self.submit(plan).result()
            taken: int | None = torch.cuda.max_memory_allocated(self.device) - before
        else:
            with PeakMemory() as peak:
                self.submit(plan).result()
            taken = peak.bytes
        self.submit(StepPlan(-1, end=slots)).result()
        return taken

    # -- one step -----------------------------------------------------------------------------------------
    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        started_s = time.perf_counter()
        if self.rank is not None:
            self.rank.take_tokens(plan, self.table)
            plan = self.rank.split.own_plan(plan)
        self.table.end(plan.end)
        swap_blocks(plan, self.pool)
        self.table.apply(plan)
        self.cache.copy_blocks(plan.copies)
        if self.drafter is not None:
            self.drafter.change(plan)
        result = self._compute(plan) if plan.slots else StepResult(tokens=[])
        result.started_s, result.finished_s = started_s, time.perf_counter()
        return result

    def _compute(self, plan: StepPlan) -> StepResult:
        if plan.drafts:
            write_drafts(plan, self.table)
        rows = self.table.rows(plan)
        draws = draws_of(plan, rows)
        last_tokens, logit_row_of_draw = draws.token_rows, np.arange(len(draws.token_rows))
        if (np.diff(last_tokens) <= 0).any():  # parallel samples begin at one row
            last_tokens, logit_row_of_draw = np.unique(draws.token_rows, return_inverse=True)
        prompts = {row: self._prompt_positions(rows, row) for row in plan.prompt_logprob_rows}
        pools = [
            np.arange(rows.query_starts[row] + first - rows.starts[row], rows.query_starts[row + 1])
            for row, first in zip(plan.pool_rows, plan.pool_starts, strict=True)
        ]
        # Logits are wanted at the last token of every drawn row, then at prompt positions; hidden states
        # themselves where embeddings are made.
        wanted = [
            last_tokens,
            *(int(rows.query_starts[row]) + positions for row, positions in prompts.items()),
            *pools,
        ]
        with self._telling(plan.sends):
            output = self._forward(rows, np.concatenate(wanted))

        result = StepResult(tokens=[])
        if self.rank is not None and not self.rank.part.last:
            self.rank.expect_tokens(draws.slots, draws.positions, self.table)
            return result
        offset = len(last_tokens)
        for row, positions in prompts.items():

            def logits_of(first: int, size: int, begin: int = offset) -> Tensor:
                return self.model.logits(output[begin + first : begin + first + size])

            slot, start = int(rows.slots[row]), int(rows.starts[row])
            result.prompt_logprobs[row] = self.table.prompt_logprobs(slot, start, len(positions), logits_of)
            offset += len(positions)
        for positions in pools:
            hidden = output[offset : offset + len(positions)]
            result.pooled.append(hidden.sum(dim=0, dtype=torch.float64).cpu().numpy())
            offset += len(positions)
        if len(draws.slots):
            self._draw(plan, draws, output[: len(last_tokens)], logit_row_of_draw, result)
        if plan.proposals and self.drafter is not None:
            began_s = time.perf_counter()
            behind = [(draw, plan.draw_slots[draw], count) for draw, count in plan.proposals]
            result.proposed, result.chances = self.drafter.propose(behind, self.table, plan.proposal_floor)
            result.proposing_s = time.perf_counter() - began_s
        return result

    @contextmanager
    def _telling(self, sends: list[Send]) -> Iterator[None]:
        """Whoever waits for these rows' KV is told of every layer; on a GPU, which runs behind, at the end."""
        if not sends or self.layer_teller is None:
            yield
            return
        tell = self.layer_teller(sends)
        if self.device.type != "cpu":
            yield
            torch.cuda.current_stream(self.device).synchronize()
            tell(self.cache.spec.layers - 1)
            return
        self.cache.on_layer = tell
        try:
            yield
        finally:
            self.cache.on_layer = None

    def _forward(self, rows: StepRows, wanted: Ints) -> Tensor:
        """Hidden states of the wanted tokens; of a pipeline's last stage only."""
        own = None if self.rank is None else self.rank.split.own_rows(rows, wanted)
        if own is None:
            return self.model.forward(self.table.forward_batch(rows, wanted, self.device), self.cache)
        batch = self.table.forward_batch(own.rows, own.wanted, self.device)
        batch.shares = own.shares
        output = self.model.forward(batch, self.cache)
        assert self.rank is not None
        return self.rank.all_hidden(own, output) if self.rank.part.last else output

    def _draw(
        self, plan: StepPlan, draws: StepDraws, hidden: Tensor, logit_rows: Ints, result: StepResult
    ) -> None:
        logits = self.model.logits(hidden)
        batch = self.table.draw_batch(draws.slots, draws.positions, logit_rows, logits.shape[-1])
        drawn = draw(logits, batch)
        if plan.drafts:
            take_accepted(plan, draws, drawn, self.table, result)
            return
        self.table.write_drawn(draws.slots, draws.positions, drawn.tokens)
        if self.rank is not None:
            self.rank.send_tokens(drawn.tokens)
        result.tokens = drawn.tokens.tolist()
        result.logprobs, result.errors = drawn.logprobs, drawn.errors

    def _prompt_positions(self, rows: StepRows, row: int) -> Ints:
        """Offsets into the row of the tokens whose successor is a prompt token."""
        prompt_length = int(self.table.prompt_lengths[rows.slots[row]])
        return np.arange(max(0, min(int(rows.counts[row]), prompt_length - 1 - int(rows.starts[row]))))
