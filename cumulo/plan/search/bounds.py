"""Bounds below a plan's time, and its memory, that cost microseconds: with them the search drops what cannot win.

Both are admissible: never above what the cost model or the memory ledger says of any plan they stand for.
"""

from dataclasses import replace
from functools import cache

from cumulo.layout.layout import Layout
from cumulo.pipeline.decide.catalog import family
from cumulo.pipeline.decide.costs import ChunkCost
from cumulo.plan.job import Recompute, TrainJob
from cumulo.plan.memory.peak import (
    LayerMemory,
    StageLayers,
    layer_memory,
    least_activation_bytes,
    least_state_bytes,
    stage_layers,
)
from cumulo.plan.search.space import JobShape, TrainGoal, Variant, job_of
from cumulo.plan.time.chunks import Pieces, chunks_of, is_paired, pieces_of
from cumulo.plan.time.compute_profile import Profile
from cumulo.plan.time.pipeline_bounds import bound_s
from cumulo.plan.time.step import Surroundings, surroundings


class Bounds:
    """For one goal. Shapes that differ only in dp and pp have the same work, which is asked for once."""

    def __init__(self, goal: TrainGoal, profile: Profile) -> None:
        self.goal, self.profile = goal, profile
        self._model_s = cache(self._count_model_s)
        self._layer_s = cache(self._count_layer_s)
        self._weights_s = cache(self._count_weights_s)
        self._memory = cache(self._count_memory)
        self._costs: dict[tuple[object, ...], tuple[ChunkCost, ...]] = {}
        self._surroundings: dict[tuple[object, ...], Surroundings] = {}
        self._pieces: dict[tuple[object, ...], Pieces] = {}
        self._states: dict[tuple[object, ...], int] = {}
        self._held: dict[tuple[object, ...], StageLayers] = {}
        # The first whose layers are like most: some mixtures begin with layers that have no experts.
        self._stage = 1 if goal.model.moe is not None and goal.model.moe.dense_layers else 0

    def shape_s(self, shape: JobShape, recompute: Recompute = "none") -> float:
        """Some stage has at least the average stage's work, under every schedule, and some the most weights."""
        model_s = self._model_s(*shape[1:2], *shape[3:], recompute)
        each_s = model_s / shape.pp + self._weights_s(shape.tp, shape.pp, shape.ep)
        return shape.micro_batches(self.goal.global_batch) * each_s + self.profile.step_s

    def pipeline_s(self, shape: JobShape, schedule: str, chunks: int, recompute: Recompute) -> float:
        """With what the average stage waits for the first micro-batch to reach it, and for the last to go back.

        A stage's chunk has at least layers // chunks layers, and stage s waits for s of them: (p - 1)/2 on average.
        """
        least_s = self.shape_s(shape, recompute)
        if shape.pp == 1:
            return least_s
        layers = self.goal.model.layers
        forward_s, both_s = self._layer_s(*shape[1:2], *shape[3:])
        chosen = family(schedule)
        if chosen.bidirectional:  # and from the nearer end: (p/2 - 1)/2 of p chunks on average
            return least_s + (shape.pp / 2 - 1) / 2 * (layers // shape.pp) * forward_s
        layer_s = forward_s if chosen.splits_backward else both_s
        return least_s + (shape.pp - 1) / 2 * (layers // (shape.pp * chunks)) * layer_s

    def plan_s(self, shape: JobShape, job: TrainJob) -> tuple[float, float]:
        """The cost model's own lower bound of a job (`step_time` that plays no schedule), from shared costs; and
        what none that recomputes more can be below: its pipeline takes as long, and more travels behind it."""
        costs = self._chunk_costs(shape, job)
        pipeline_s = bound_s(job.layout.schedule, shape.pp, job.micro_batches, job.chunks_per_stage, costs)
        around = self._surroundings.get((shape, job.layout.zero))
        if around is None:
            around = surroundings(job, self.goal.cluster, self.profile)
            self._surroundings[shape, job.layout.zero] = around
        micro_batch_s = sum([cost.forward_s + cost.backward_s for cost in costs]) / shape.pp
        alone_s = pipeline_s + around.optimizer_s + around.weights_s + self.profile.step_s
        plan_s = alone_s + around.data_s(job, self.profile, micro_batch_s)
        if self.goal.offload_activations:  # the more is recomputed, the less there is to move
            return plan_s, 0.0
        return plan_s, alone_s + around.data_s(job, self.profile, float("inf"))

    def _chunk_costs(self, shape: JobShape, job: TrainJob) -> tuple[ChunkCost, ...]:
        key = (*shape[1:], job.chunks, job.chunks_per_stage, job.recompute, is_paired(job))
        if key not in self._costs:
            self._costs[key] = chunks_of(job, self.goal.cluster, self.profile, self._pieces_of(job)).costs
        return self._costs[key]

    def fitting(
        self, shape: JobShape, variants: tuple[Variant, ...], limit_bytes: float
    ) -> tuple[Variant, ...]:
        """Those for which a stage near the front may have enough memory, of variants that differ in what they
        recompute: it holds at least its states, and the micro-batches kept there."""
        split = (*shape[1:2], *shape[3:])
        states, held = self.stage_holds(shape, variants[0], min(self._stage, shape.pp - 1))
        if states > limit_bytes:
            return ()
        left = limit_bytes - states
        return tuple(
            one
            for one in variants
            if least_activation_bytes(self._memory(*split, one.recompute), held) <= left
        )

    def stage_holds(self, shape: JobShape, variant: Variant, stage: int) -> tuple[int, StageLayers]:
        """Its states, and its layers with the micro-batches kept there."""
        schedule, chunks, zero, _ = variant
        # Shapes that differ in how dp × cp is split have the same states, but for a group's buffers; micro-batches
        # change none of them, whatever the framework.
        ranks = shape.dp * shape.cp
        mesh = (shape.tp, shape.pp, ranks, shape.cp > 1, shape.ep, schedule, chunks, zero, stage)
        states = self._states.get(mesh)
        if states is None:
            states = self._states[mesh] = least_state_bytes(job_of(shape, variant, self.goal), stage)
        micro_batches = shape.micro_batches(self.goal.global_batch)
        pipeline = (shape.pp, schedule, chunks, micro_batches, stage)
        held = self._held.get(pipeline)
        if held is None:
            held = self._held[pipeline] = stage_layers(job_of(shape, variant, self.goal), stage)
        return states, held

    def _count_model_s(
        self, tp: int, cp: int, ep: int, micro_batch: int, sequence_parallel: bool, recompute: Recompute
    ) -> float:
        """Forward and backward of everything, in one chunk."""
        job = self._job(1, tp, cp, ep, micro_batch, sequence_parallel, recompute)
        (cost,) = chunks_of(job, self.goal.cluster, self.profile, self._pieces_of(job)).costs
        return cost.forward_s + cost.backward_s

    def _count_weights_s(self, tp: int, pp: int, ep: int) -> float:
        """What `surroundings` counts for one micro-batch, whatever the ZeRO stage and the schedule: gradients are
        added, weights cast."""
        job = self._job(pp, tp, 1, ep, 1, False, "none")
        return surroundings(job, self.goal.cluster, self.profile).weights_s

    def _count_layer_s(
        self, tp: int, cp: int, ep: int, micro_batch: int, sequence_parallel: bool
    ) -> tuple[float, float]:
        """Forward, and forward and backward, of the cheapest layer, when nothing is computed again."""
        job = self._job(1, tp, cp, ep, micro_batch, sequence_parallel, "none")
        layers = [passes for passes, _ in self._pieces_of(job).layers.values()]
        return min(each.forward.total for each in layers), min(each.total for each in layers)

    def _pieces_of(self, job: TrainJob) -> Pieces:
        """Shared by jobs that differ in dp and in their pipelines only."""
        layout = job.layout
        split = (layout.tp, layout.cp, layout.ep, job.micro_batch, layout.sequence_parallel)
        alike = (*split, job.recompute, is_paired(job))
        if alike not in self._pieces:
            self._pieces[alike] = pieces_of(job, self.goal.cluster, self.profile)
        return self._pieces[alike]

    def _count_memory(
        self, tp: int, cp: int, ep: int, micro_batch: int, sequence_parallel: bool, recompute: Recompute
    ) -> LayerMemory:
        return layer_memory(self._job(1, tp, cp, ep, micro_batch, sequence_parallel, recompute))

    def _job(
        self,
        pp: int,
        tp: int,
        cp: int,
        ep: int,
        micro_batch: int,
        sequence_parallel: bool,
        recompute: Recompute,
    ) -> TrainJob:
        """One micro-batch of a rank."""
        layout = Layout(ep, tp, pp, cp, ep, 0, sequence_parallel)
        return replace(self.goal, global_batch=ep * micro_batch).job(layout, micro_batch, recompute)
