"""CudaRunner: plays StepPlans on one GPU. The engine submits plans; it decides nothing itself.

A step is one copy of a few words and one launch of a captured graph, which reads the tokens the step before has
drawn, computes, draws, and writes them where the next step reads them. Nobody waits: the host fetches a step's
tokens when they have arrived, while the next steps already run. Draws that need the host (guides, penalties,
log-probabilities) wait for it, in their own steps only.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import Rounds, StepPlan, TokenLogprobs
from cumulo.engine.decide.speculation.rounds import kinds_of_rounds
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.play.cuda_rounds import HeadRounds, RoundsAhead, round_shape, warm_rounds
from cumulo.engine.play.cuda_step import CudaStep
from cumulo.engine.play.device_slots import DeviceSlots
from cumulo.engine.play.rank_play import DeviceRank, OwnRows
from cumulo.engine.play.slot_table import NO_ROWS, SlotTable, StepRows
from cumulo.engine.play.step_words import (
    DRAW_WORDS,
    StepShape,
    draw_words,
    gained_blocks,
    have_cuts,
    pack,
    pack_homes,
    shape_of,
)
from cumulo.engine.play.swap_pool import SwapPool
from cumulo.engine.play.verify import (
    draft_places,
    draws_of,
    round_draws,
    write_drafts,
)
from cumulo.engine.play.warm_shapes import warm_shapes
from cumulo.engine.sampling.sampler import draw, token_logprobs
from cumulo.kernels.cuda.attention.latent_plan import LatentPlan
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.captured import CapturedGraphs
from cumulo.kernels.cuda.compile_ahead import compiling_ahead
from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.sampling.sample import SampleBuffers, sample
from cumulo.kernels.cuda.sampling.sample_cuts import CutBuffers, sample_with_cuts
from cumulo.kernels.low_rank import AdapterRows, group_rows
from cumulo.models.adapters.files import AdapterWeights
from cumulo.models.batch import KVCache
from cumulo.models.play.cuda_decoder import CudaDecoder, StepTensors

log = logging.getLogger(__name__)

_CAPTURED_TOKENS = 2048  # larger steps keep the GPU busy longer than the host needs to launch them
_MOST_GRAPHS = 96
_RESULTS = 8  # steps whose tokens may be on their way to the host
_PROMPT_LOGIT_ROWS = 64


class CudaRunner:
    def __init__(
        self,
        model: CudaDecoder,
        cache: KVCache,
        *,
        max_slots: int,
        max_context: int,
        eos_token_ids: Sequence[int] = (),
        host_blocks: int = 0,
        guidance: Guidance | None = None,
        graphs: bool = True,
        meet_ranks: Callable[[], None] | None = None,
        rank: DeviceRank | None = None,
    ) -> None:
        """`meet_ranks`: waits for the other ranks that play the same plans, where the model is one rank's part;
        `rank`: what this one tells them besides."""
        self.model, self.cache, self.device = model, cache, cache.key_storage.device
        self.table = SlotTable(max_slots, max_context, cache.block_size, eos_token_ids, guidance)
        draws = max(max_slots, model.max_outputs)  # more than slots where a few may verify drafts
        self.slots = DeviceSlots(
            max_slots,
            max_context,
            cache.block_size,
            model.max_tokens,
            draws,
            self.device,
            0 if rank is None or rank.part.layout.dp == 1 else rank.part.layout.dp,
        )
        self.pool = SwapPool(cache, host_blocks) if host_blocks else None
        self._most = StepShape(model.max_tokens, draws, model.max_outputs)
        self._buffers = SampleBuffers(draws, model.vocab_size, self.device)
        self._cut_buffers = CutBuffers(draws, model.vocab_size, self.device)
        self._picked = torch.zeros(draws, dtype=torch.int32, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._arrived = [torch.zeros(draws, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_RESULTS)]
        self.in_flight: deque[CudaStep] = deque()
        self.owners = np.zeros(max_slots, dtype=np.int64)  # how many sequences each slot has held so far
        self._submitted = 0
        self._plans: dict[StepShape, AttentionPlan | LatentPlan] = {}
        # Others use its scratch: steps run one after the other.
        self._largest_plan: AttentionPlan | LatentPlan | None = None
        self._graphs: CapturedGraphs[StepShape] = CapturedGraphs()
        self._seen: set[StepShape] = set()
        self._rehearsed: set[tuple[StepShape, bool]] = set()
        self._use_graphs = graphs and on_gpu
        self._meet_ranks, self.rank = meet_ranks, rank
        self.head: HeadRounds | None = None  # drafts; given after the model is in place
        self._ahead: RoundsAhead | None = None  # rounds behind the last step's
        self._closed = False

    # -- the Runner protocol ------------------------------------------------------------------------------
    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> CudaStep:
        if self._closed:
            raise RuntimeError("this runner was closed; no more steps can be submitted")
        pending = CudaStep(self, plan)
        ahead, self._ahead = self._ahead, None
        try:
            if self.rank is not None:
                self.rank.take_tokens(plan, self.slots.tokens)
                plan = self.rank.homes.own_plan(plan)
            self._change(plan, pending)
            if plan.slots:
                self._compute(plan, pending, ahead)
        except Exception as error:
            pending.failed = error
        pending.end()
        if plan.rounds is not None and plan.rounds_ahead and pending.failed is None:
            self._run_ahead(plan, plan.rounds, pending)
        self.in_flight.append(pending)
        return pending

    def close(self) -> None:
        self._settle()
        self._closed = True
        self._graphs.forget()

    @torch.inference_mode()
    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Compile, or load, every kernel that a step may need, before anyone waits for one. Where ranks play
        together they rehearse each shape when it comes."""
        if self._meet_ranks is not None:
            return
        shapes = warm_shapes(self._most, self.model.adapters is not None)
        if self.head is not None:
            shapes = [replace(shape, follows=True) for shape in shapes]
            shapes += warm_rounds(self._most, kinds_of_rounds(self.head.levels))
        adapters = self.model.adapters
        with (
            self.model.one_layer_of_each_kind(),
            nullcontext() if adapters is None else adapters.every_matrix(),
        ):
            if self.device.type == "cuda":
                tell(f"compiling kernels for {len(shapes)} step shapes, or loading them from the last start")
                with compiling_ahead():
                    for shape in shapes:
                        self._launch_nothing(shape)
            tell("preparing the first steps")
            for shape in shapes:
                self._launch_nothing(shape)
        self._synchronise()

    def _launch_nothing(self, shape: StepShape) -> None:
        """A step of this shape without a sequence in it."""
        stage = self.slots.stage()
        pack(stage.array, shape, NO_ROWS, {}, NO_ROWS.slots, np.zeros((0, len(DRAW_WORDS)), np.int32))
        self.slots.send(stage, shape)
        if shape.adapters and self.model.adapters is not None:
            nobody = group_rows(NO_ROWS.slots.astype(np.int32))
            self.model.adapters.send(AdapterRows(nobody, nobody), shape.tokens, shape.draws)
        self._launch(shape)

    def memory_bytes(self) -> dict[str, int]:
        """What this runner holds on the device, by the names of the memory ledger's rows."""
        held = {"weights": self.model.weight_bytes, "kv cache": self.cache.nbytes}
        held["activations"] = self.model.buffer_bytes - self.model.logits.nbytes
        held["logits"] = self.model.logits.nbytes + self._buffers.nbytes + self._cut_buffers.nbytes
        held["token tables"] = self.slots.nbytes
        if self.model.adapters is not None:
            held["adapters"] = self.model.adapters.bank.nbytes
        if self.head is not None:
            held |= self.head.memory_bytes()
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            held["libraries and graphs"] = max(0, total - free - sum(held.values()))
        return held

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Into a slot that no sequence of a plan to come refers to before the caller says so."""
        assert self.model.adapters is not None
        self.model.adapters.bank.install(slot, weights)
        if self.model.adapters.look_again():
            self._synchronise()
            self._graphs.forget(lambda shape: shape.adapters)

    def measure_step(self, tokens: int, draws: int) -> int | None:
        """Nothing to measure: a step works in buffers that are held, and counted, already."""
        return None

    def measure_swap_s(self) -> float:
        """Seconds to move one block to the host pool, measured on both empty caches before the first step."""
        if self.pool is None:
            return float("inf")
        pairs = [(block, block) for block in range(min(4, self.cache.blocks, self.pool.blocks))]
        self.pool.copy_out(pairs)
        self._synchronise()
        started_s = time.perf_counter()
        self.pool.copy_out(pairs)
        self._synchronise()
        return (time.perf_counter() - started_s) / len(pairs)

    # -- one step -----------------------------------------------------------------------------------------
    def _change(self, plan: StepPlan, pending: CudaStep) -> None:
        """Everything a plan changes before it computes, in the order it says."""
        self.table.end(plan.end)
        if plan.swap_out or plan.swap_in:
            if self.pool is None:
                raise RuntimeError(f"step {plan.index} swaps blocks, but this runner has no host blocks")
            self.pool.copy_out(plan.swap_out)
            self.pool.give(plan.swap_in)
        for new in plan.begin:
            self.owners[new.slot] += 1
        pending.of_row, rest = gained_blocks(plan, self.table.block_counts)
        if plan.rounds is not None:  # they may lie ahead of where this step ends: tables must have them now
            rest += [(plan.slots[row], index, block) for row, (index, block) in pending.of_row.items()]
            pending.of_row = {}
        self.table.apply(plan)
        self.slots.begin(plan.begin)
        self.slots.set_blocks(rest)
        if plan.copies:
            self.cache.copy_blocks(plan.copies)
            if self.head is not None:
                self.head.cache.copy_blocks(plan.copies)

    def _compute(self, plan: StepPlan, pending: CudaStep, ahead: RoundsAhead | None) -> None:
        if plan.rounds is not None:
            self._compute_rounds(plan, plan.rounds, pending, ahead)
            return
        if plan.drafts:
            write_drafts(plan, self.table)
            self.slots.set_tokens(draft_places(plan))
        rows = self.table.rows(plan)
        draws = draws_of(plan, rows)
        slots, positions = draws.slots, draws.positions
        columns = self.table.columns[slots]
        cuts = bool(have_cuts(columns, self.model.vocab_size).any())
        words, stage = draw_words(columns, slots, positions), self.slots.stage()
        own = None if self.rank is None else self.rank.homes.own_rows(rows, draws.token_rows)
        if own is None:
            shape = shape_of(int(rows.query_starts[-1]), len(rows.slots), len(slots), self._most, cuts)
            shape = replace(shape, follows=self.head is not None and plan.feeds_head)
            pack(stage.array, shape, rows, pending.of_row, draws.token_rows, words)
        else:
            shape = self._pack_own(stage.array, rows, own, pending.of_row, words, cuts)
        self.slots.send(stage, shape)
        wide = bool(plan.prompt_logprob_rows or plan.pool_rows)
        if self.model.adapters is not None:
            adapted = self.table.adapter_rows(rows, draws.token_rows, "cpu")
            if adapted is not None:
                shape = replace(shape, adapters=True)
                self.model.adapters.send(adapted, shape.tokens, shape.draws)
        self._play(shape, captured=not wide)
        self.table.lengths[slots] = positions + 1  # the tokens themselves follow
        if not self.model.draws:
            if self.rank is not None:
                self.rank.expect_tokens(slots)
            return
        pending.draws = draws
        special = self._special(columns, slots, positions)
        if special.any():
            self._draw_on_host(np.flatnonzero(special), slots, positions, pending)
        if wide:  # last: it computes logits in the place of those that were drawn from
            self._read_positions(plan, rows, own, pending)
        if self.rank is not None:
            self.rank.send_tokens(self.slots.views(shape)[1][: len(slots)], self.slots.tokens)
        pending.owners = self.owners[slots]

    def _pack_own(
        self, out: NDArray[np.int32], rows: StepRows, own: OwnRows, of_row: dict[int, tuple[int, int]],
        words: NDArray[np.int32], cuts: bool,
    ) -> StepShape:  # fmt: skip
        """Of a step whose rows are on several ranks, those that are here. All ranks have one shape."""
        decodes_only, draws = int(rows.query_starts[-1]) == len(rows.slots), len(own.owners)
        shape = shape_of(max(own.shares), own.most_rows, draws, self._most, cuts, decodes_only)
        everything = shape_of(sum(own.shares), len(rows.slots), draws, self._most)
        shape = replace(shape, homes=len(own.shares), all_tokens=everything.tokens)
        blocks = {int(own.place[row]): gained for row, gained in of_row.items() if own.place[row] >= 0}
        logit_rows = np.zeros(draws, dtype=np.int64)  # what others compute is asked for anywhere
        logit_rows[own.here] = own.wanted
        pack(out, shape, own.rows, blocks, logit_rows, words)
        pack_homes(out, shape, np.array(own.shares), own.owners)
        return shape

    def _compute_rounds(
        self, plan: StepPlan, rounds: Rounds, pending: CudaStep, ahead: RoundsAhead | None
    ) -> None:
        rows, draws = round_draws(plan, rounds.drafts)
        columns = self.table.columns[draws.slots]
        cuts = bool(have_cuts(columns, self.model.vocab_size).any())
        shape = round_shape(len(plan.slots), rounds, self._most, cuts)
        if ahead is not None and ahead.are_first_of(plan, shape, self.owners):
            pending.turn, pending.played_before = ahead.turn, ahead.count
        else:
            stage = self.slots.stage()
            words = draw_words(columns, draws.slots, draws.positions)
            pack(stage.array, shape, rows, pending.of_row, draws.token_rows, words)
            self.slots.send(stage, shape)
            assert self.head is not None
            self.head.begin()
        for _ in range(pending.played_before, rounds.times):  # each leaves for the next one what it needs
            self._play(shape, captured=True)
        pending.round_shape = shape

    def _run_ahead(self, plan: StepPlan, rounds: Rounds, pending: CudaStep) -> None:
        """Further rounds, which the device plays while the host takes in what those before them have drawn."""
        shape = pending.round_shape
        assert shape is not None
        try:
            for _ in range(plan.rounds_ahead):
                self._play(shape, captured=True)
        except Exception as error:
            pending.failed = error
            return
        turn = pending.turn + rounds.times
        self._ahead = pending.ahead = RoundsAhead(
            shape, plan.slots[:], self.owners[plan.slots], plan.rounds_ahead, turn
        )

    def _play(self, shape: StepShape, captured: bool) -> None:
        if self._meet_ranks is not None and (shape, captured) not in self._rehearsed:
            self._rehearse(shape, captured)
        graph = self._graphs.get(shape) if captured else None
        if graph is None and captured and self._use_graphs and shape.tokens <= _CAPTURED_TOKENS:
            # The first step of a shape runs as it is, which compiles what it needs; the second is captured.
            if shape in self._seen and len(self._graphs) < _MOST_GRAPHS:
                graph = self._captured(shape)
                if self._meet_ranks is not None:
                    self._meet_ranks()
            self._seen.add(shape)
        if graph is not None:
            graph.replay()
        else:
            self._launch(shape, every_row=not captured)

    def _rehearse(self, shape: StepShape, captured: bool) -> None:
        """Load every kernel of a new shape before any of them waits for another rank: loading may have to wait
        until the GPU has nothing left to do. What it computes is overwritten by the step that follows."""
        assert self._meet_ranks is not None
        self._synchronise()
        self._meet_ranks()  # nobody reads any more what the step before left for the others
        with self.model.rehearsal():
            self._launch(shape, every_row=not captured)
        self._synchronise()
        self._rehearsed.add((shape, captured))
        self._meet_ranks()

    def _launch(self, shape: StepShape, every_row: bool = False) -> None:
        """Every kernel of a step of this shape, from the words to the drawn tokens."""
        if shape.rounds is None:
            self._launch_once(shape, every_row)
            if shape.follows:
                assert self.head is not None
                self.head.follow(shape)
            return
        assert self.head is not None
        count = self.head.lanes(shape, shape.rounds)
        chain, attention = (
            self._attention(StepShape(count, count, 0, decodes_only=True)),
            self._launch_once(shape),
        )
        assert isinstance(chain, AttentionPlan) and isinstance(attention, AttentionPlan)
        self.head.end_round(shape, shape.rounds, self._picked, attention, chain)

    def _launch_once(self, shape: StepShape, every_row: bool = False) -> AttentionPlan | LatentPlan:
        """... without what a head does behind them."""
        slots = self.slots
        slots.unpack(shape)
        attention = self._attention(shape)
        attention.prepare(
            slots.query_starts(shape), slots.contexts[: shape.rows], slots.step_tables[: shape.rows]
        )
        if self.head is not None and isinstance(attention, AttentionPlan):
            self.head.begin_round(shape, attention)
        logit_rows, draws = slots.views(shape)
        tokens = shape.tokens
        step = StepTensors(
            slots.token_ids[:tokens], slots.positions[:tokens], slots.kv_slots[:tokens], logit_rows, attention,
            homes=slots.homes(shape),
        )  # fmt: skip
        if shape.adapters:
            assert self.model.adapters is not None
            step.adapters = self.model.adapters.views(tokens, shape.draws)
        logits = self.model.forward(step, self.cache, every_row)
        if not self.model.draws:
            return attention
        if shape.cuts and len(logits):
            whole = self.model.whole_logits(len(logits))
            sample_with_cuts(whole, draws, self._buffers, self._cut_buffers, self._picked, slots.tokens)
        elif self.model.slice is not None:
            self.model.slice.draw(len(logits), draws, self._picked, slots.tokens)
        else:
            sample(logits, draws, self._buffers, self._picked, slots.tokens)
        return attention

    def _captured(self, shape: StepShape) -> "torch.cuda.CUDAGraph | None":
        """A step that cannot be captured (for want of memory, say) can still be launched: no request fails."""
        try:
            return self._capture(shape)
        except Exception:
            log.exception("%s could not be captured; from now on steps of new shapes are launched", shape)
            self._use_graphs = False
            return None

    def _capture(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        return self._graphs.capture(shape, lambda: self._launch(shape))

    def _attention(self, shape: StepShape) -> AttentionPlan | LatentPlan:
        shape = StepShape(shape.tokens, shape.rows, shape.draws, shape.decodes_only)  # attention sees no more
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self.model.attention_plan(
                shape.tokens, shape.rows, shape.decodes_only, self.cache, self.slots.tables.shape[1],
                share_scratch_with=self._largest_plan,
            )  # fmt: skip
            if self._largest_plan is None or plan.nbytes > self._largest_plan.nbytes:
                self._largest_plan = plan
        return plan

    # -- what needs the host ------------------------------------------------------------------------------
    def _special(
        self, columns: NDArray[np.void], slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Draws that the device cannot make alone."""
        special: NDArray[np.bool_] = columns["edited"] | (columns["logprobs"] >= 0)
        special |= positions - self.table.prompt_lengths[slots] < self.table.min_tokens[slots]
        if self.table.guided:
            special |= np.array([params is not None and params.guide is not None for params in
                                 (self.table.params[slot] for slot in slots.tolist())], dtype=bool)  # fmt: skip
        return special

    def _draw_on_host(
        self,
        draws: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        pending: CudaStep,
    ) -> None:
        """Draw these again with everything their parameters ask for; what the device drew is replaced."""
        self._settle()  # penalties and guides look at the tokens so far
        logits = self.model.whole_logits(len(slots))[torch.from_numpy(draws).to(self.device)]
        chosen, where = slots[draws], positions[draws]
        batch = self.table.draw_batch(chosen, where, np.arange(len(draws)), logits.shape[-1])
        drawn = draw(logits, batch)
        pending.host_draws, pending.drawn = draws, drawn
        self.slots.set_tokens(list(zip(chosen.tolist(), where.tolist(), drawn.tokens.tolist(), strict=True)))

    def _read_positions(self, plan: StepPlan, rows: StepRows, own: OwnRows | None, pending: CudaStep) -> None:
        """Log-probabilities of prompt tokens, and sums of hidden states for embeddings."""
        norm, stream = self.model.decoder.final_norm.weight, self.model.stream

        def hidden(row: int, first: int, count: int) -> Tensor:
            """Of so many tokens of a row of the step."""
            starts, index = (
                (rows.query_starts, row) if own is None else (own.rows.query_starts, own.place[row])
            )
            if index < 0:
                states = stream.new_zeros((count, stream.shape[1]))
            else:
                picked = (
                    torch.arange(count, dtype=torch.int32, device=self.device) + int(starts[index]) + first
                )
                states = rms_norm(stream, norm, self.model.spec.norm_eps, rows=picked)
            return states if self.rank is None else self.rank.all_states(states)

        for row in plan.prompt_logprob_rows:
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            count = min(int(rows.counts[row]), int(self.table.prompt_lengths[slot]) - 1 - start)
            params, entries = self.table.params[slot], list[TokenLogprobs]()
            wanted = (params.prompt_logprobs or 0) if params is not None else 0
            most = min(_PROMPT_LOGIT_ROWS, self.model.max_outputs)
            for first in range(0, max(0, count), most):
                size = min(most, count - first)
                states = hidden(row, first, size)
                self.model.logits_of(states, self.model.logits[:size])
                logits = self.model.whole_logits(size).float()
                begin = start + first + 1
                tokens = self.table.tokens[slot, begin : begin + size].astype(np.int64)
                entries += token_logprobs(logits, tokens, np.full(size, wanted))
            pending.prompt_logprobs[row] = entries
        for row, first in zip(plan.pool_rows, plan.pool_starts, strict=True):
            begin = first - int(rows.starts[row])
            states = hidden(row, begin, int(rows.counts[row]) - begin)
            pending.pooled.append(states.sum(dim=0, dtype=torch.float64).cpu().numpy())

    # -- results ------------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Wait for the tokens of every step submitted so far and enter them into the host's table."""
        while self.in_flight:
            self.in_flight[0].arrive()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def send_back(self, draws: int) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """Start the copy of the drawn tokens to the host."""
        target = self._arrived[self._submitted % _RESULTS]
        while len(self.in_flight) >= _RESULTS:
            self.in_flight[0].arrive()
        self._submitted += 1
        target[:draws].copy_(self._picked[:draws], non_blocking=True)
        if self.device.type != "cuda":
            return target, None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return target, event
