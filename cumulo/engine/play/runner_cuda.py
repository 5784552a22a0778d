"""CudaRunner: plays StepPlans on one GPU. The engine submits plans; it decides nothing itself.

A step is one copy of a few words and one launch of a captured graph, which reads the tokens the step before has
drawn, computes, draws, and writes them where the next step reads them. Nobody waits: the host fetches a step's
tokens when they have arrived, while the next steps already run. Draws that need the host (guides, penalties,
log-probabilities) wait for it, in their own steps only.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import Rounds, Send, StepPlan
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.play.cuda.device_slots import DeviceSlots
from cumulo.engine.play.cuda.host_reads import HiddenReader, LayerEvents, Tell, need_host
from cumulo.engine.play.cuda.launches import CudaStep, StepLaunches
from cumulo.engine.play.cuda.rounds import RoundsAhead, round_shape, warm_rounds
from cumulo.engine.play.cuda.step_words import (
    DRAW_WORDS,
    StepShape,
    draw_words,
    gained_blocks,
    have_cuts,
    pack,
    pack_split,
    shape_of,
    warm_shapes,
)
from cumulo.engine.play.rank_play import DeviceRank, OwnRows
from cumulo.engine.play.slot_table import NO_ROWS, SlotTable, StepRows
from cumulo.engine.play.swap_pool import SwapPool, swap_blocks
from cumulo.engine.play.verify import draft_places, draws_of, round_draws, write_drafts
from cumulo.engine.sampling.distribution import Ints
from cumulo.engine.sampling.sampler import draw
from cumulo.kernels.cuda.captured import compiling_ahead
from cumulo.kernels.low_rank import AdapterRows, group_rows
from cumulo.models.adapters.files import AdapterWeights
from cumulo.models.batch import KVCache
from cumulo.models.play.cuda_decoder import CudaDecoder

_RESULTS = 8  # steps whose tokens may be on their way to the host


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
        rank: DeviceRank | None = None,
    ) -> None:
        """`rank`: what this one says to others that play the same plans, where the model is one rank's part."""
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
        links = None if rank is None else rank.links
        self.launches = StepLaunches(model, cache, self.slots, draws, graphs, links)
        on_gpu = self.device.type == "cuda"
        self._arrived = [torch.zeros(draws, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_RESULTS)]
        self.in_flight: deque[CudaStep] = deque()
        self.owners = np.zeros(max_slots, dtype=np.int64)  # how many sequences each slot has held so far
        self._submitted = 0
        self.rank = rank
        # Who is told of each layer of rows that other engines wait for; None: they are told when a step has ended.
        self.layer_teller: Callable[[list[Send]], Tell] | None = None
        self._layers: LayerEvents | None = None
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
                plan = self.rank.split.own_plan(plan)
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
        self.launches.graphs.forget()

    @torch.inference_mode()
    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Compile, or load, every kernel that a step may need, before anyone waits for one. Where ranks play
        together they rehearse each shape when it comes."""
        if self.rank is not None:
            return
        shapes = warm_shapes(self._most, self.model.adapters is not None)
        if self.launches.head is not None:
            shapes = [replace(shape, follows=True) for shape in shapes]
            shapes += warm_rounds(self._most, self.launches.head.draws_without_logits)
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
        self.launches.synchronise()

    def _launch_nothing(self, shape: StepShape) -> None:
        """A step of this shape without a sequence in it."""
        stage = self.slots.stage()
        pack(stage.array, shape, NO_ROWS, {}, NO_ROWS.slots, np.zeros((0, len(DRAW_WORDS)), np.int32))
        self.slots.send(stage, shape)
        if shape.adapters and self.model.adapters is not None:
            nobody = group_rows(NO_ROWS.slots.astype(np.int32))
            self.model.adapters.send(AdapterRows(nobody, nobody), shape.tokens, shape.draws)
        self.launches.launch(shape)

    def memory_bytes(self) -> dict[str, int]:
        """What this runner holds on the device, by the names of the memory ledger's rows."""
        held = {"weights": self.model.weight_bytes, "kv cache": self.cache.nbytes}
        held["activations"] = self.model.buffer_bytes - self.model.logits.nbytes
        held["logits"] = self.model.logits.nbytes + self.launches.sampling_bytes
        held["token tables"] = self.slots.nbytes
        if self.model.adapters is not None:
            held["adapters"] = self.model.adapters.bank.nbytes
        if self.launches.head is not None:
            held |= self.launches.head.memory_bytes()
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            held["libraries and graphs"] = max(0, total - free - sum(held.values()))
        return held

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Into a slot that no sequence of a plan to come refers to before the caller says so."""
        assert self.model.adapters is not None
        self.model.adapters.bank.install(slot, weights)
        if self.model.adapters.look_again():
            self.launches.synchronise()
            self.launches.graphs.forget(lambda shape: shape.adapters)

    def measure_step(self, tokens: int, draws: int) -> int | None:
        """Nothing to measure: a step works in buffers that are held, and counted, already."""
        return None

    # -- one step -----------------------------------------------------------------------------------------
    def _change(self, plan: StepPlan, pending: CudaStep) -> None:
        """Everything a plan changes before it computes, in the order it says."""
        self.table.end(plan.end)
        swap_blocks(plan, self.pool)
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
            if self.launches.head is not None:
                self.launches.head.cache.copy_blocks(plan.copies)

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
        own = None if self.rank is None else self.rank.split.own_rows(rows, draws.token_rows)
        if own is None:
            shape = shape_of(int(rows.query_starts[-1]), len(rows.slots), len(slots), self._most, cuts)
            shape = replace(shape, follows=self.launches.head is not None and plan.feeds_head)
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
        with self._telling(plan.sends) as tells:
            self.launches.play(shape, captured=not wide, in_graph=not tells)
        self.table.lengths[slots] = positions + 1  # the tokens themselves follow
        if not self.model.draws:
            if self.rank is not None:
                self.rank.expect_tokens(slots)
            return
        pending.draws = draws
        special = need_host(self.table, columns, slots, positions)
        if special.any():
            self._draw_on_host(np.flatnonzero(special), slots, positions, pending)
        if wide:  # last: it computes logits in the place of those that were drawn from
            reader = HiddenReader(self.model, self.table, rows, own, self.rank)
            pending.prompt_logprobs = {row: reader.prompt_logprobs(row) for row in plan.prompt_logprob_rows}
            pending.pooled = reader.pooled(plan)
        if self.rank is not None:
            self.rank.send_tokens(self.slots.views(shape)[1][: len(slots)], self.slots.tokens)
        pending.owners = self.owners[slots]

    @contextmanager
    def _telling(self, sends: list[Send]) -> Iterator[bool]:
        """Whether layers are told of; a graph would play them all at once."""
        if not sends or self.layer_teller is None:
            yield False
            return
        tell = self.layer_teller(sends)
        layers = self._layers = self._layers or LayerEvents(self.device)
        self.model.on_layer = lambda layer: layers.mark(tell, layer)
        try:
            yield True
        finally:
            self.model.on_layer = None

    def _pack_own(
        self, out: NDArray[np.int32], rows: StepRows, own: OwnRows, of_row: dict[int, tuple[int, int]],
        words: NDArray[np.int32], cuts: bool,
    ) -> StepShape:  # fmt: skip
        """Of a step whose rows are on several ranks, those that are here. All ranks have one shape."""
        decodes_only, draws = int(rows.query_starts[-1]) == len(rows.slots), len(own.owners)
        shape = shape_of(max(own.shares), own.most_rows, draws, self._most, cuts, decodes_only)
        everything = shape_of(sum(own.shares), len(rows.slots), draws, self._most)
        shape = replace(shape, data_ranks=len(own.shares), all_tokens=everything.tokens)
        blocks = {int(own.place[row]): gained for row, gained in of_row.items() if own.place[row] >= 0}
        logit_rows = np.zeros(draws, dtype=np.int64)  # what others compute is asked for anywhere
        logit_rows[own.here] = own.wanted
        pack(out, shape, own.rows, blocks, logit_rows, words)
        pack_split(out, shape, np.array(own.shares), own.owners)
        return shape

    def _compute_rounds(
        self, plan: StepPlan, rounds: Rounds, pending: CudaStep, ahead: RoundsAhead | None
    ) -> None:
        rows, draws = round_draws(plan, rounds.drafts)
        columns = self.table.columns[draws.slots]
        cuts = bool(have_cuts(columns, self.model.vocab_size).any())
        assert self.launches.head is not None
        greedy = self.launches.head.draws_without_logits and bool(columns["greedy"].all())
        shape = round_shape(len(plan.slots), rounds, self._most, cuts, greedy)
        if ahead is not None and ahead.are_first_of(plan, shape, self.owners):
            pending.turn, pending.played_before = ahead.turn, ahead.count
        else:
            stage = self.slots.stage()
            words = draw_words(columns, draws.slots, draws.positions)
            pack(stage.array, shape, rows, pending.of_row, draws.token_rows, words)
            self.slots.send(stage, shape)
            self.launches.head.begin()
        for _ in range(pending.played_before, rounds.times):  # each leaves for the next one what it needs
            self.launches.play(shape, captured=True)
        pending.round_shape = shape

    def _run_ahead(self, plan: StepPlan, rounds: Rounds, pending: CudaStep) -> None:
        """Further rounds, which the device plays while the host takes in what those before them have drawn."""
        shape = pending.round_shape
        assert shape is not None
        try:
            for _ in range(plan.rounds_ahead):
                self.launches.play(shape, captured=True)
        except Exception as error:
            pending.failed = error
            return
        turn = pending.turn + rounds.times
        self._ahead = pending.ahead = RoundsAhead(
            shape, plan.slots[:], self.owners[plan.slots], plan.rounds_ahead, turn
        )

    def _draw_on_host(self, draws: Ints, slots: Ints, positions: Ints, pending: CudaStep) -> None:
        """Draw these again with everything their parameters ask for; what the device drew is replaced."""
        self._settle()  # penalties and guides look at the tokens so far
        logits = self.model.whole_logits(len(slots))[torch.from_numpy(draws).to(self.device)]
        chosen, where = slots[draws], positions[draws]
        batch = self.table.draw_batch(chosen, where, np.arange(len(draws)), logits.shape[-1])
        drawn = draw(logits, batch)
        pending.host_draws, pending.drawn = draws, drawn
        self.slots.set_tokens(list(zip(chosen.tolist(), where.tolist(), drawn.tokens.tolist(), strict=True)))

    # -- results ------------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Wait for the tokens of every step submitted so far and enter them into the host's table."""
        while self.in_flight:
            self.in_flight[0].arrive()

    def send_back(self, draws: int) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """Start the copy of the drawn tokens to the host."""
        target = self._arrived[self._submitted % _RESULTS]
        while len(self.in_flight) >= _RESULTS:
            self.in_flight[0].arrive()
        self._submitted += 1
        target[:draws].copy_(self.launches.picked[:draws], non_blocking=True)
        if self.device.type != "cuda":
            return target, None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return target, event
