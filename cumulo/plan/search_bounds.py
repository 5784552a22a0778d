"""Bounds below a plan's time, and its memory, that cost microseconds: with them the search drops what cannot win.

Both are admissible: never above what the cost model or the memory ledger says of any plan they stand for.
"""

from dataclasses import dataclass, replace
from functools import cache

from cumulo.pipeline.costs import ChunkCost
from cumulo.plan.compute_profile import Profile
from cumulo.plan.job import Recompute, TrainJob
from cumulo.plan.memory import CONTEXT_BYTES, chunk_activation_bytes
from cumulo.plan.memory_states import Elements, layer_elements, state_bytes
from cumulo.plan.search_space import Shape, TrainGoal, ZeroStage
from cumulo.plan.train_time_chunks import chunks_of
from cumulo.plan.train_time_data import around
from cumulo.plan.train_time_pipeline import bound_s
from cumulo.spec.layout import Layout
from cumulo.spec.model import ModelSpec

# Schedules whose backward is one action: a stage's last one is followed by those of all chunks before it.
_WHOLE_BACKWARD = ("1f1b", "interleaved-1f1b", "gpipe")
_FROM_BOTH_ENDS = "dualpipe"


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one micro-batch on one rank, as if it had no pipeline."""

    model_s: float  # forward and backward of everything
    layer_s: float  # of the cheapest layer
    layer_forward_s: float


class Bounds:
    """For one goal. Shapes that differ only in dp and pp have the same work, which is asked for once."""

    def __init__(self, goal: TrainGoal, profile: Profile) -> None:
        self.goal, self.profile = goal, profile
        self._work = cache(self._count_work)
        self._costs: dict[tuple[object, ...], tuple[ChunkCost, ...]] = {}
        self._states = cache(self._count_states)
        self._kept = cache(self._count_kept)

    def shape_s(self, shape: Shape, recompute: Recompute = "none") -> float:
        """Some stage has at least the average stage's work, under every schedule."""
        work = self._work(*shape[1:2], *shape[3:], recompute)
        return shape.micro_batches(self.goal.global_batch) * work.model_s / shape.pp + self.profile.step_s

    def pipeline_s(self, shape: Shape, schedule: str, chunks: int, recompute: Recompute) -> float:
        """With what the average stage waits for the first micro-batch to reach it, and for the last to go back.

        A stage's chunk has at least layers // chunks layers, and stage s waits for s of them: (p - 1)/2 on average.
        """
        least_s = self.shape_s(shape, recompute)
        if shape.pp == 1 or schedule == _FROM_BOTH_ENDS:
            return least_s
        work = self._work(*shape[1:2], *shape[3:], recompute)
        layer_s = work.layer_s if schedule in _WHOLE_BACKWARD else work.layer_forward_s
        return least_s + (shape.pp - 1) / 2 * (self.goal.model.layers // (shape.pp * chunks)) * layer_s

    def schedule_s(self, shape: Shape, job: TrainJob) -> float:
        """With the costs of the job's own chunks, which other jobs with as many of them share."""
        costs = self._chunk_costs(shape, job)
        if shape.pp == 1:
            pipeline_s = job.micro_batches * (costs[0].forward_s + costs[0].backward_s)
        else:
            schedule = job.layout.schedule
            pipeline_s = bound_s(schedule, shape.pp, job.micro_batches, job.chunks_per_stage, costs)
        return pipeline_s + self.profile.step_s

    def plan_s(self, shape: Shape, job: TrainJob) -> float:
        """The cost model's own lower bound of a job (`train_time.lower_bound_s`), from shared chunk costs."""
        costs = self._chunk_costs(shape, job)
        micro_batch_s = sum(cost.forward_s + cost.backward_s for cost in costs) / shape.pp
        beside = around(job, self.goal.cluster, self.profile, micro_batch_s)
        return self.schedule_s(shape, job) + beside.data_s + beside.optimizer_s + beside.weights_s

    def _chunk_costs(self, shape: Shape, job: TrainJob) -> tuple[ChunkCost, ...]:
        key = (*shape[1:], job.chunks, job.recompute)
        if key not in self._costs:
            self._costs[key] = chunks_of(job, self.goal.cluster, self.profile).costs
        return self._costs[key]

    def memory_bytes(self, shape: Shape, zero: ZeroStage, recompute: Recompute) -> float:
        """Some stage holds at least the average stage's states (embedding and head not counted) and, before the
        first backward ends, one micro-batch of all its layers."""
        states = self._states(shape.dp, shape.tp, shape.cp, shape.ep, zero)
        kept = self._kept(*shape[1:2], *shape[3:], recompute)
        return (states + kept) / shape.pp + CONTEXT_BYTES

    def _count_work(
        self, tp: int, cp: int, ep: int, micro_batch: int, sequence_parallel: bool, recompute: Recompute
    ) -> Work:
        def seconds(model: ModelSpec) -> tuple[float, float]:
            job = self._job(model, tp, cp, ep, micro_batch, sequence_parallel, recompute)
            (passes,) = chunks_of(job, self.goal.cluster, self.profile).passes
            return passes.total, passes.forward.total

        layers = []
        for kind in _kinds(self.goal.model):
            two, one = seconds(replace(kind, layers=2)), seconds(replace(kind, layers=1))
            layers.append((two[0] - one[0], two[1] - one[1]))
        return Work(seconds(self.goal.model)[0], min(layers)[0], min(layer[1] for layer in layers))

    def _count_kept(
        self, tp: int, cp: int, ep: int, micro_batch: int, sequence_parallel: bool, recompute: Recompute
    ) -> int:
        job = self._job(self.goal.model, tp, cp, ep, micro_batch, sequence_parallel, recompute)
        return chunk_activation_bytes(job, 0)

    def _job(
        self,
        model: ModelSpec,
        tp: int,
        cp: int,
        ep: int,
        micro_batch: int,
        sequence_parallel: bool,
        recompute: Recompute,
    ) -> TrainJob:
        """One micro-batch on one stage."""
        experts = ep if model.moe is not None else 1
        layout = Layout(dp=ep, tp=tp, cp=cp, ep=experts, sequence_parallel=sequence_parallel)
        batch, length = ep * micro_batch, self.goal.sequence_length
        return TrainJob(model, layout, batch, length, micro_batch, recompute=recompute, dtype=self.goal.dtype)

    def _count_states(self, dp: int, tp: int, cp: int, ep: int, zero: ZeroStage) -> int:
        model = self.goal.model
        layout = Layout(dp=dp, tp=tp, cp=cp, ep=ep, zero=zero)
        job = TrainJob(
            model, layout, dp, self.goal.sequence_length, dtype=self.goal.dtype, optimizer=self.goal.optimizer
        )
        found = Elements()
        for has_experts, layers in enumerate(job.chunk_kinds[0]):
            if layers:
                found = found.plus(layer_elements(model, bool(has_experts), tp, ep), layers)
        states = state_bytes(job, found)
        return states.weights + states.gradients + states.optimizer


def _kinds(model: ModelSpec) -> list[ModelSpec]:
    """The model as if all its layers were of one kind, for each; windowed, where some are: those are cheapest."""
    windowed = replace(model, windowed_layers=None)
    if model.moe is None:
        return [windowed]
    experts = replace(windowed, moe=replace(model.moe, dense_layers=()))
    return [experts, replace(windowed, moe=None)] if model.moe.dense_layers else [experts]
