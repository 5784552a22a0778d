"""StepLaunches: every kernel of a step, from its words to the drawn tokens, launched one by one or as a captured
graph. CudaRunner says which shape is next; what the step computes is on the device already.
"""

import logging
import time
from collections import deque
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import Rounds, StepPlan, StepResult, TokenLogprobs
from cumulo.engine.play.cuda.device_slots import DeviceSlots
from cumulo.engine.play.cuda.rounds import HeadRounds, RoundsAhead, rows_of
from cumulo.engine.play.cuda.step_words import StepShape
from cumulo.engine.play.slot_table import SlotTable
from cumulo.engine.play.verify import StepDraws, take_accepted, take_rounds
from cumulo.engine.sampling.sampler import Drawn
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.captured import CapturedGraphs
from cumulo.kernels.cuda.sampling.sample import SampleBuffers, sample
from cumulo.kernels.cuda.sampling.sample_cuts import CutBuffers, sample_with_cuts
from cumulo.models.batch import KVCache
from cumulo.models.play.cuda_decoder import CudaDecoder, StepTensors
from cumulo.models.play.rank_links import RankLinks


class StepOwner(Protocol):
    """What a step needs of its runner."""

    table: SlotTable
    device: torch.device
    launches: "StepLaunches"
    in_flight: "deque[CudaStep]"  # oldest first
    owners: NDArray[np.int64]  # how many sequences each slot has held so far

    def send_back(self, draws: int) -> "tuple[Tensor, torch.cuda.Event | None]":
        """Start the copy of the drawn tokens to the host."""
        ...


class CudaStep:
    """A step on its way. `result` waits for it; until then it only knows what the host has computed itself."""

    def __init__(self, runner: StepOwner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan
        self._submitted_s = time.perf_counter()
        self._started = torch.cuda.Event(enable_timing=True) if runner.device.type == "cuda" else None
        if self._started is not None:
            self._started.record()
        self.of_row: dict[int, tuple[int, int]] = {}
        self.turn = self.played_before = 0  # of rounds: the first's number, and how many were launched before
        self.round_shape: StepShape | None = None
        self.ahead: RoundsAhead | None = None  # launched behind it
        self.owners = np.zeros(0, dtype=np.int64)
        self.draws = StepDraws(self.owners, self.owners, self.owners, self.owners)
        self.host_draws: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.drawn: Drawn | None = None
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.pooled: list[NDArray[np.float64]] = []
        self.failed: Exception | None = None
        self._result: StepResult | None = None
        self._ended: torch.cuda.Event | None = None

    def end(self) -> None:
        """Everything has been launched: from here on only time has to pass."""
        if self.failed is None:
            try:
                if self._plan.rounds is not None and self._runner.launches.head is not None:
                    self._ended = self._runner.launches.head.send_back(len(self._plan.slots))
                else:
                    self._target, self._ended = self._runner.send_back(len(self.draws.slots))
            except Exception as error:
                self.failed = error

    def result(self) -> StepResult:
        while self._result is None and self.failed is None:
            self._runner.in_flight[0].arrive()  # steps arrive in order
        if self.failed is not None:
            self.arrive()
            raise self.failed
        assert self._result is not None
        return self._result

    def arrive(self) -> None:
        """Wait for the tokens, enter them into the host's table, and make the result of them."""
        pending = self._runner.in_flight
        if pending and pending[0] is self:
            pending.popleft()
        if self.failed is not None or self._result is not None:
            return
        try:
            if self._ended is not None:
                self._ended.synchronize()
            finished_s = time.perf_counter()
            if self._plan.rounds is not None:
                self._result = self._rounds_result(self._plan.rounds, finished_s)
                return
            tokens = self._target[: len(self.draws.slots)].numpy().astype(np.int64)
        except Exception as error:  # a kernel failed: this is the first the host hears of it
            self.failed = error
            return
        result = self._new_result(finished_s)
        logprobs, errors = dict[int, TokenLogprobs](), dict[int, str]()
        if self.drawn is not None:
            tokens[self.host_draws] = self.drawn.tokens
            places = self.host_draws.tolist()
            logprobs = {places[index]: entry for index, entry in self.drawn.logprobs.items()}
            errors = {places[index]: error for index, error in self.drawn.errors.items()}
        for draw_index in np.flatnonzero(tokens < 0).tolist():
            errors[draw_index] = "the model returned NaN or infinite logits"
        tokens = np.maximum(tokens, 0)
        table, slots, positions = self._runner.table, self.draws.slots, self.draws.positions
        if self._plan.drafts:  # nothing was planned behind this step: every slot is whose it was
            take_accepted(self._plan, self.draws, Drawn(tokens, logprobs, errors), table, result)
        else:
            # A slot may have been given to another sequence since: a late token must not land in its text.
            still = self.owners == self._runner.owners[slots]
            table.tokens[slots[still], positions[still]] = tokens[still]
            result.tokens, result.logprobs, result.errors = tokens.tolist(), logprobs, errors
        result.prompt_logprobs, result.pooled = self.prompt_logprobs, self.pooled
        self._result = result

    def _rounds_result(self, rounds: Rounds, finished_s: float) -> StepResult:
        head, result = self._runner.launches.head, self._new_result(finished_s)
        assert head is not None
        told = head.told(len(self._plan.slots), rounds, self.turn)
        if self.ahead is not None:
            self.ahead.starts = (np.array(self._plan.starts) + (told[:, :, 0] + 1).sum(axis=1)).tolist()
        take_rounds(self._plan, told, self._runner.table, result)
        if self.played_before:  # since it was submitted, the device has played the others only
            share = rounds.times / (rounds.times - self.played_before)
            result.started_s = finished_s - share * (finished_s - result.started_s)
        return result

    def _new_result(self, finished_s: float) -> StepResult:
        elapsed_s = finished_s - self._submitted_s
        if self._started is not None and self._ended is not None:
            elapsed_s = self._started.elapsed_time(self._ended) / 1e3
        return StepResult(tokens=[], started_s=finished_s - elapsed_s, finished_s=finished_s)


log = logging.getLogger(__name__)

_CAPTURED_TOKENS = 2048  # larger steps keep the GPU busy longer than the host needs to launch them
_MOST_GRAPHS = 96


class StepLaunches:
    def __init__(
        self,
        model: CudaDecoder,
        cache: KVCache,
        slots: DeviceSlots,
        draws: int,
        graphs: bool,
        links: RankLinks | None,
    ) -> None:
        """`draws`: of one step, at most. `links`: to the other ranks that play the same steps."""
        self._model, self._cache, self._slots, self._links = model, cache, slots, links
        self.head: HeadRounds | None = None  # drafts behind each step
        self.picked = torch.zeros(draws, dtype=torch.int32, device=slots.device)
        self._buffers = SampleBuffers(draws, model.vocab_size, slots.device)
        self._cut_buffers = CutBuffers(draws, model.vocab_size, slots.device)
        self._plans: dict[StepShape, AttentionPlan] = {}
        # Others use its scratch: steps run one after the other.
        self._largest_plan: AttentionPlan | None = None
        self.graphs: CapturedGraphs[StepShape] = CapturedGraphs()
        self.seen: set[StepShape] = set()
        self._rehearsed: set[tuple[StepShape, bool]] = set()
        self._use_graphs = graphs and slots.device.type == "cuda"

    @property
    def sampling_bytes(self) -> int:
        """What drawing works in, besides the logits."""
        return self._buffers.nbytes + self._cut_buffers.nbytes

    def play(self, shape: StepShape, captured: bool, in_graph: bool = True) -> None:
        """A step of this shape: as a graph, if it may be `captured` and is not to be watched layer by layer."""
        if self._links is not None and (shape, captured) not in self._rehearsed:
            self._rehearse(shape, captured, self._links)
        graph = self.graphs.get(shape) if captured and in_graph else None
        if graph is None and captured and in_graph and self._use_graphs and shape.tokens <= _CAPTURED_TOKENS:
            # The first step of a shape runs as it is, which compiles what it needs; the second is captured.
            if shape in self.seen and len(self.graphs) < _MOST_GRAPHS:
                graph = self._captured(shape)
            self.seen.add(shape)
        if graph is not None:
            graph.replay()
        else:
            self.launch(shape, every_row=not captured)

    def synchronise(self) -> None:
        if self._slots.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _rehearse(self, shape: StepShape, captured: bool, links: RankLinks) -> None:
        """Load every kernel of a new shape before any of them waits for another rank: loading may have to wait
        until the GPU has nothing left to do. What it computes is overwritten by the step that follows. If a rank
        cannot launch it, all stop."""

        def rehearse() -> None:
            with self._model.rehearsal():
                self.launch(shape, every_row=not captured)
            self.synchronise()

        links.together(self.synchronise)  # nobody reads any more what the step before left for the others
        links.together(rehearse)
        self._rehearsed.add((shape, captured))

    def _captured(self, shape: StepShape) -> "torch.cuda.CUDAGraph | None":
        """A step that cannot be captured (for want of memory, say) can still be launched: no request fails. What
        one rank cannot capture none plays: all go on in the same way, and meet as often."""
        graph, failed = None, None
        try:
            graph = self.graphs.capture(shape, lambda: self.launch(shape))
        except Exception as error:
            failed = error
        reasons = [str(failed)] if failed is not None else []
        if self._links is not None:
            reasons = self._links.complaints(failed)
        if not reasons:
            return graph
        log.error(
            "%s could not be captured (%s); from now on steps of new shapes are launched",
            shape,
            "; ".join(reasons),
            exc_info=failed,
        )
        self._use_graphs = False
        self.graphs.forget(lambda other: other == shape)
        return None

    # -- launches, in the order of a step -----------------------------------------------------------------
    def launch(self, shape: StepShape, every_row: bool = False) -> None:
        """Every kernel of a step of this shape, from the words to the drawn tokens."""
        if shape.rounds is None:
            self._launch_model(shape, every_row)
            if shape.follows:
                assert self.head is not None
                self.head.follow(shape)
            return
        assert self.head is not None
        count = rows_of(shape, shape.rounds)
        chain = self._attention(StepShape(count, count, 0, decodes_only=True))
        attention = self._launch_model(shape)
        self.head.end_round(shape, shape.rounds, self.picked, attention, chain)

    def _launch_model(self, shape: StepShape, every_row: bool = False) -> AttentionPlan:
        """... without what a head does behind them."""
        slots, model, entered = self._slots, self._model, False
        attention = self._attention(shape)
        if self.head is not None:
            entered = self.head.enter_round(shape, attention)
        if not entered:
            slots.unpack(shape)
            attention.prepare(
                slots.query_starts(shape), slots.contexts[: shape.rows], slots.step_tables[: shape.rows]
            )
        logit_rows, draws = slots.views(shape)
        tokens = shape.tokens
        step = StepTensors(
            slots.token_ids[:tokens], slots.positions[:tokens], slots.kv_slots[:tokens], logit_rows, attention,
            split=slots.split(shape), entered=entered, wants_logits=not shape.greedy,
        )  # fmt: skip
        if shape.adapters:
            assert model.adapters is not None
            step.adapters = model.adapters.views(tokens, shape.draws)
        logits = model.forward(step, self._cache, every_row)
        if not model.draws or shape.greedy:
            return attention
        if shape.cuts and len(logits):
            whole = model.whole_logits(len(logits))
            sample_with_cuts(whole, draws, self._buffers, self._cut_buffers, self.picked, slots.tokens)
        elif model.slice is not None:
            model.slice.draw(len(logits), draws, self.picked, slots.tokens)
        else:
            sample(logits, draws, self._buffers, self.picked, slots.tokens)
        return attention

    def _attention(self, shape: StepShape) -> AttentionPlan:
        shape = StepShape(shape.tokens, shape.rows, shape.draws, shape.decodes_only)  # attention sees no more
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._model.attention_plan(
                shape.tokens, shape.rows, shape.decodes_only, self._cache, self._slots.tables.shape[1],
                share_scratch_with=self._largest_plan,
            )  # fmt: skip
            if self._largest_plan is None or plan.nbytes > self._largest_plan.nbytes:
                self._largest_plan = plan
        return plan
