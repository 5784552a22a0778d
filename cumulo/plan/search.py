"""The search for the best training plan: exact over the space of `search_space`. `cumulo plan train` calls it.

Branch and bound, best first. A shape (sizes of all axes and the micro-batch) is bounded by the arithmetic of one
rank, which no schedule avoids; a pipeline also by how long its stages wait to begin; a plan by the cost model's own
lower bound. Only plans that fit into memory and may still win are timed by playing their schedule. No bound is ever
above the time it bounds, so the best plan found is the best of the space (a test compares with trying all).
"""

import heapq
import itertools
from dataclasses import dataclass, replace

from cumulo.pipeline.catalog import FAMILIES
from cumulo.plan.compute_profile import shipped
from cumulo.plan.estimate import TrainEstimate
from cumulo.plan.job import Recompute, TrainJob
from cumulo.plan.memory import peak_memory
from cumulo.plan.search_bounds import Bounds
from cumulo.plan.search_space import (
    Choices,
    Shape,
    TrainGoal,
    Variant,
    ZeroStage,
    job_of,
    pipelines,
    shapes,
    zero_stages,
)
from cumulo.plan.train_time import estimate

# Bounds and estimates add the same numbers in different orders: what differs by less is equal.
_SLACK = 1 - 1e-9
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Plan:
    job: TrainJob
    estimate: TrainEstimate


@dataclass(frozen=True, slots=True)
class SearchResult:
    plans: tuple[Plan, ...]  # the fastest of each mesh (dp, tp, pp, cp, ep), fastest first
    enumerated: int  # plans in the space
    too_large: int  # of those looked at, how many do not fit into memory
    timed: int  # how many were timed by playing their schedule


def search(goal: TrainGoal, choices: Choices | None = None, keep: int = 5) -> SearchResult:
    """The `keep` best meshes, each with its best schedule, ZeRO stage, recomputation and micro-batch."""
    return _Search(goal, choices or Choices(), keep).run()


def timed(job: TrainJob, goal: TrainGoal) -> Plan:
    """One given plan."""
    return Plan(job, replace(estimate(job, goal.cluster), memory=peak_memory(job)))


@dataclass(frozen=True, slots=True)
class _Branch:
    """All plans of a shape; with a schedule, those that have it and one recompute choice; with a job, that one."""

    shape: Shape
    schedule: str | None = None
    chunks_per_stage: int | None = None
    recompute: Recompute = "none"
    job: TrainJob | None = None


class _Search:
    """The state of one search."""

    def __init__(self, goal: TrainGoal, choices: Choices, keep: int) -> None:
        self.goal, self.choices, self.keep = goal, choices, keep
        profile, _ = shipped().find(goal.cluster.device, goal.dtype, "current")
        self.bounds = Bounds(goal, profile)
        self.best: dict[tuple[int, ...], tuple[float, TrainJob]] = {}  # by mesh
        self.worst_kept_s = _NEVER
        self.enumerated = self.too_large = self.timed = 0
        self.order = itertools.count()  # equal bounds: first come, first served
        self.queue: list[tuple[float, int, _Branch]] = []

    def run(self) -> SearchResult:
        for shape in shapes(self.goal, self.choices):
            ways = len(self._pipelines(shape))
            self.enumerated += ways * len(self._zero_stages(shape)) * len(self.choices.recompute)
            if ways:
                self._push(self.bounds.shape_s(shape), _Branch(shape))
        while self.queue:
            bound_s, _, branch = heapq.heappop(self.queue)
            if bound_s * _SLACK >= self.worst_kept_s:
                break  # and so are all after it
            if self._hopeless(bound_s, branch.shape):
                continue
            if branch.job is not None:
                self._try(branch.shape, branch.job)
            elif branch.schedule is not None:
                self._branch_by_zero(branch, branch.schedule)
            else:
                self._branch_by_schedule(branch.shape)
        ranked = sorted(self.best.values(), key=lambda found: found[0])[: self.keep]
        plans = tuple(timed(job, self.goal) for _, job in ranked)
        return SearchResult(plans, self.enumerated, self.too_large, self.timed)

    def _push(self, bound_s: float, branch: _Branch) -> None:
        heapq.heappush(self.queue, (bound_s, next(self.order), branch))

    def _branch_by_schedule(self, shape: Shape) -> None:
        for schedule, chunks in self._pipelines(shape):
            for recompute in self.choices.recompute:
                each = chunks or FAMILIES[schedule].chunks_per_stage
                bound_s = self.bounds.pipeline_s(shape, schedule, each, recompute)
                if not self._hopeless(bound_s, shape):
                    self._push(bound_s, _Branch(shape, schedule, chunks, recompute))

    def _branch_by_zero(self, branch: _Branch, schedule: str) -> None:
        """The plans of a branch differ in their ZeRO stage only, so they share the time of their pipeline."""
        for zero in self._zero_stages(branch.shape):
            needs = self.bounds.memory_bytes(branch.shape, zero, branch.recompute)
            if needs > self.goal.memory_limit_bytes:
                self.too_large += 1
                continue
            variant = Variant(schedule, branch.chunks_per_stage, zero, branch.recompute)
            job = job_of(branch.shape, variant, self.goal)
            if self._hopeless(self.bounds.schedule_s(branch.shape, job), branch.shape):
                return
            bound_s = self.bounds.plan_s(branch.shape, job)
            if not self._hopeless(bound_s, branch.shape):
                self._push(bound_s, _Branch(branch.shape, job=job))

    def _try(self, shape: Shape, job: TrainJob) -> None:
        if peak_memory(job).total > self.goal.memory_limit_bytes:
            self.too_large += 1
            return
        self.timed += 1
        step_s = estimate(job, self.goal.cluster, self.bounds.profile, explain=False).step_s
        if step_s < self._best_s(shape):
            self.best[shape.mesh] = (step_s, job)
            if len(self.best) >= self.keep:
                self.worst_kept_s = sorted(found[0] for found in self.best.values())[self.keep - 1]

    def _pipelines(self, shape: Shape) -> tuple[tuple[str, int | None], ...]:
        micro_batches = shape.micro_batches(self.goal.global_batch)
        return pipelines(shape.pp, micro_batches, self.goal.model.layers, self.choices)

    def _zero_stages(self, shape: Shape) -> tuple[ZeroStage, ...]:
        return zero_stages(shape, self.choices)

    def _hopeless(self, bound_s: float, shape: Shape) -> bool:
        """Whether nothing of this shape that takes `bound_s` or longer can change the result."""
        return bound_s * _SLACK >= min(self._best_s(shape), self.worst_kept_s)

    def _best_s(self, shape: Shape) -> float:
        found = self.best.get(shape.mesh)
        return _NEVER if found is None else found[0]
