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
from cumulo.spec.model import ModelSpec


class Bounds:
    """For one goal. Shapes that differ only in dp and pp have the same work, which is asked for once."""

    def __init__(self, goal: TrainGoal, profile: Profile) -> None:
        self.goal, self.profile = goal, profile
        self._model_s = cache(self._count_model_s)
        self._layer_s = cache(self._count_layer_s)
        self._most_s = cache(self._count_most_s)
        self._weights_s = cache(self._count_weights_s)
        self._costs: dict[tuple[object, ...], tuple[ChunkCost, ...]] = {}
        self._pipelines: dict[tuple[object, ...], tuple[float, float]] = {}
        self._surroundings: dict[tuple[object, ...], Surroundings] = {}
        self._pieces: dict[tuple[object, ...], Pieces] = {}
        self._states: dict[tuple[object, ...], int] = {}
        self._held: dict[tuple[object, ...], StageLayers] = {}
        self._memory = cache(self._count_memory)
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

    def schedule_s(self, shape: JobShape, job: TrainJob) -> float:
        """With the costs of the job's own chunks, which other jobs with as many of them share."""
        return self._pipeline(shape, job)[0]

    def _pipeline(self, shape: JobShape, job: TrainJob) -> tuple[float, float]:
        """The bound of the schedule, and a micro-batch's time on the average stage: alike for all ZeRO stages."""
        layout = job.layout
        key = (shape, layout.schedule, layout.chunks_per_stage, job.recompute)
        found = self._pipelines.get(key)
        if found is None:
            costs = self._chunk_costs(shape, job)
            both_s = sum([cost.forward_s + cost.backward_s for cost in costs])
            pipeline_s = job.micro_batches * both_s
            if shape.pp > 1:
                pipeline_s = bound_s(
                    layout.schedule, shape.pp, job.micro_batches, job.chunks_per_stage, costs
                )
            found = self._pipelines[key] = (pipeline_s + self.profile.step_s, both_s / shape.pp)
        return found

    def beside_s(self, shape: JobShape, job: TrainJob, recompute: Recompute) -> float:
        """What is around the layers at least, when gradients and weights travel behind as much as `recompute`."""
        return self._around_s(shape, job, self._most_s(*shape[1:2], *shape[3:], recompute) / shape.pp)

    def plan_s(self, shape: JobShape, job: TrainJob) -> float:
        """The cost model's own lower bound of a job (`step_time` that plays no schedule), from shared costs."""
        schedule_s, micro_batch_s = self._pipeline(shape, job)
        return schedule_s + self._around_s(shape, job, micro_batch_s)

    def _around_s(self, shape: JobShape, job: TrainJob, micro_batch_s: float) -> float:
        key = (shape, job.layout.zero)
        beside = self._surroundings.get(key)
        if beside is None:
            beside = self._surroundings[key] = surroundings(job, self.goal.cluster, self.profile)
        return beside.data_s(job, self.profile, micro_batch_s) + beside.optimizer_s + beside.weights_s

    def _chunk_costs(self, shape: JobShape, job: TrainJob) -> tuple[ChunkCost, ...]:
        key = (*shape[1:], job.chunks, job.chunks_per_stage, job.recompute, is_paired(job))
        if key not in self._costs:
            self._costs[key] = chunks_of(job, self.goal.cluster, self.profile, self._pieces_of(job)).costs
        return self._costs[key]

    def too_large(
        self, shape: JobShape, variant: Variant, choices: tuple[Recompute, ...], limit_bytes: int
    ) -> int:
        """How many of these ways to recompute, from the first on, need more than there is: a stage near the front
        holds at least its states, and the micro-batches kept there."""
        states, held = self._stage_holds(shape, variant, min(self._stage, shape.pp - 1))
        split = (*shape[1:2], *shape[3:])
        if states <= limit_bytes:
            for number, recompute in enumerate(choices):
                if states + least_activation_bytes(self._memory(*split, recompute), held) <= limit_bytes:
                    return number
        return len(choices)

    def closer_memory_bytes(self, shape: JobShape, variant: Variant) -> float:
        """What stages at both ends hold at least (`plan.memory.peak.least_memory_bytes`)."""
        layer, last = self._memory(*shape[1:2], *shape[3:], variant.recompute), shape.pp - 1
        found = [self._stage_holds(shape, variant, stage) for stage in {0, min(1, last), last}]
        return max(states + least_activation_bytes(layer, held) for states, held in found)

    def _stage_holds(self, shape: JobShape, variant: Variant, stage: int) -> tuple[int, StageLayers]:
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
        job = self._job(self.goal.model, 1, tp, cp, ep, micro_batch, sequence_parallel, recompute)
        (cost,) = chunks_of(job, self.goal.cluster, self.profile, self._pieces_of(job)).costs
        return cost.forward_s + cost.backward_s

    def _count_weights_s(self, tp: int, pp: int, ep: int) -> float:
        """What `surroundings` counts for one micro-batch, whatever the ZeRO stage and the schedule: gradients are
        added, weights cast."""
        job = self._job(self.goal.model, pp, tp, 1, ep, 1, False, "none")
        return surroundings(job, self.goal.cluster, self.profile).weights_s

    def _count_layer_s(
        self, tp: int, cp: int, ep: int, micro_batch: int, sequence_parallel: bool
    ) -> tuple[float, float]:
        """Forward, and forward and backward, of the cheapest layer, when nothing is computed again."""
        job = self._job(self.goal.model, 1, tp, cp, ep, micro_batch, sequence_parallel, "none")
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

    def _count_most_s(
        self, tp: int, cp: int, ep: int, micro_batch: int, sequence_parallel: bool, recompute: Recompute
    ) -> float:
        """Forward and backward of everything at most: in as many chunks as can be, two of a stage, since a chunk
        may add something where a stage has several. Of an odd number of layers two share a chunk."""
        model = self.goal.model
        stages = max(1, model.layers // 2)
        job = self._job(model, stages, tp, cp, ep, micro_batch, sequence_parallel, recompute, "zb-v")
        costs = chunks_of(job, self.goal.cluster, self.profile).costs
        seconds = [cost.forward_s + cost.backward_s for cost in costs]
        return sum(seconds) + (max(seconds) if model.layers % 2 else 0.0)

    def _count_memory(
        self, tp: int, cp: int, ep: int, micro_batch: int, sequence_parallel: bool, recompute: Recompute
    ) -> LayerMemory:
        model = self.goal.model
        return layer_memory(self._job(model, 1, tp, cp, ep, micro_batch, sequence_parallel, recompute))

    def _job(
        self,
        model: ModelSpec,
        pp: int,
        tp: int,
        cp: int,
        ep: int,
        micro_batch: int,
        sequence_parallel: bool,
        recompute: Recompute,
        schedule: str = "1f1b",
    ) -> TrainJob:
        """One micro-batch of a rank."""
        experts = ep if model.moe is not None else 1
        layout = Layout(ep, tp, pp, cp, experts, 0, sequence_parallel, schedule=schedule)
        goal = replace(self.goal, model=model, global_batch=ep * micro_batch)
        return goal.job(layout, micro_batch, recompute)
