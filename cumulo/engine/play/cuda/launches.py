"""StepLaunches: every kernel of a step, from its words to the drawn tokens, launched one by one or as a captured
graph. CudaRunner says which shape is next; what the step computes is on the device already.
"""

import logging

import torch

from cumulo.engine.play.cuda.device_slots import DeviceSlots
from cumulo.engine.play.cuda.rounds import HeadRounds
from cumulo.engine.play.cuda.step_words import StepShape
from cumulo.kernels.cuda.attention.latent_plan import LatentPlan
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.captured import CapturedGraphs
from cumulo.kernels.cuda.sampling.sample import SampleBuffers, sample
from cumulo.kernels.cuda.sampling.sample_cuts import CutBuffers, sample_with_cuts
from cumulo.models.batch import KVCache
from cumulo.models.play.cuda_decoder import CudaDecoder, StepTensors
from cumulo.models.play.rank_links import RankLinks

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
        self._plans: dict[StepShape, AttentionPlan | LatentPlan] = {}
        # Others use its scratch: steps run one after the other.
        self._largest_plan: AttentionPlan | LatentPlan | None = None
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
        count = self.head.lanes(shape, shape.rounds)
        chain = self._attention(StepShape(count, count, 0, decodes_only=True))
        attention = self._launch_model(shape)
        assert isinstance(chain, AttentionPlan) and isinstance(attention, AttentionPlan)
        self.head.end_round(shape, shape.rounds, self.picked, attention, chain)

    def _launch_model(self, shape: StepShape, every_row: bool = False) -> AttentionPlan | LatentPlan:
        """... without what a head does behind them."""
        slots, model, entered = self._slots, self._model, False
        attention = self._attention(shape)
        if self.head is not None and isinstance(attention, AttentionPlan):
            entered = self.head.enter_round(shape, attention)
        if not entered:
            slots.unpack(shape)
            attention.prepare(
                slots.query_starts(shape), slots.contexts[: shape.rows], slots.step_tables[: shape.rows]
            )
        if self.head is not None and isinstance(attention, AttentionPlan):
            self.head.begin_round(shape, attention)
        logit_rows, draws = slots.views(shape)
        tokens = shape.tokens
        step = StepTensors(
            slots.token_ids[:tokens], slots.positions[:tokens], slots.kv_slots[:tokens], logit_rows, attention,
            homes=slots.homes(shape), entered=entered, wants_logits=not shape.greedy,
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

    def _attention(self, shape: StepShape) -> AttentionPlan | LatentPlan:
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
