"""The search for the best training plan: exact over the space of `space`. `cumulo plan train` calls it.

Branch and bound, best first. A shape (sizes of all axes and the micro-batch) is bounded by the arithmetic of one
rank, which no schedule avoids; a pipeline also by how long its stages wait to begin; a plan by the cost model's own
lower bound. Only plans that fit into memory and may still win are timed by playing their schedule.

No bound is ever above the time it bounds, so the best plan found is the best of the space (a test compares with
trying all).
"""

import gc
import heapq
import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cumulo.pipeline.decide.catalog import FAMILIES
from cumulo.plan.job import Recompute, TrainJob
from cumulo.plan.memory.ledger import TrainEstimate
from cumulo.plan.memory.peak import fits_into, least_memory_bytes, peak_memory
from cumulo.plan.search.bounds import Bounds
from cumulo.plan.search.space import (
    Choices,
    JobShape,
    TrainGoal,
    Variant,
    job_of,
    pipelines,
    shapes,
    zero_stages,
)
from cumulo.plan.time.compute_profile import Profile, shipped
from cumulo.plan.time.step import estimate

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


def search(
    goal: TrainGoal, choices: Choices | None = None, keep: int = 5, faster_than_s: float = _NEVER
) -> SearchResult:
    """The `keep` best meshes, each with its best schedule, ZeRO stage, recomputation and micro-batch: of those that
    are `faster_than_s`."""
    collects = gc.isenabled()
    gc.disable()  # nothing here refers to itself, and walking a million steps of schedules takes a second
    try:
        return _Search(goal, choices or Choices(), keep, faster_than_s).run()
    finally:
        if collects:
            gc.enable()


def timed(job: TrainJob, goal: TrainGoal) -> Plan:
    """One given plan."""
    return Plan(job, replace(estimate(job, goal.cluster), memory=peak_memory(job)))


class _First(NamedTuple):
    job: TrainJob
    bound_s: float  # the cost model's own
    least_s: float  # what no plan that recomputes more can be below


class _Branch(NamedTuple):
    """All plans of a shape; with a schedule, those that have it; with variants, these, which differ in how much
    they recompute."""

    shape: JobShape
    schedule: tuple[str, int | None] | None = None  # and chunks of a stage
    variants: tuple[Variant, ...] = ()  # from little to much
    first: _First | None = None  # of them, for which the bound was worked out


@lru_cache(2)
def _bounds(goal: TrainGoal, profile: Profile) -> Bounds:
    """Searches that differ in how much memory there is share what is known of their shapes."""
    return Bounds(goal, profile)


class _Search:
    """The state of one search."""

    def __init__(self, goal: TrainGoal, choices: Choices, keep: int, faster_than_s: float) -> None:
        self.goal, self.choices, self.keep = goal, choices, keep
        profile, _ = shipped().find(goal.cluster.device, goal.dtype, goal.software)
        self.bounds = _bounds(replace(goal, memory_bytes=None), profile)
        self.best: dict[tuple[int, ...], tuple[float, TrainJob]] = {}  # by mesh
        self.worst_kept_s = faster_than_s  # or of the last that is kept
        self.enumerated = self.too_large = self.timed = 0
        self.order = itertools.count()  # equal bounds: first come, first served
        self.queue: list[tuple[float, int, _Branch]] = []

    def run(self) -> SearchResult:
        for shape in shapes(self.goal, self.choices):
            ways = len(self._pipelines(shape))
            self.enumerated += ways * len(zero_stages(shape, self.choices)) * len(self.choices.recompute)
            if ways:
                self._push(self.bounds.shape_s(shape), _Branch(shape))
        while self.queue:
            bound_s, _, branch = heapq.heappop(self.queue)
            if bound_s * _SLACK >= self.worst_kept_s:
                break  # and so are all after it
            if not self._hopeless(bound_s, branch.shape):
                self._split(bound_s, branch)
        ranked = sorted(self.best.values(), key=lambda found: found[0])[: self.keep]
        plans = tuple(timed(job, self.goal) for _, job in ranked)
        return SearchResult(plans, self.enumerated, self.too_large, self.timed)

    def _push(self, bound_s: float, branch: _Branch) -> None:
        if not self._hopeless(bound_s, branch.shape):
            heapq.heappush(self.queue, (bound_s, next(self.order), branch))

    def _split(self, bound_s: float, branch: _Branch) -> None:
        """Into what it stands for, each with its own bound; of variants the first is tried."""
        shape, schedule, recompute = branch.shape, branch.schedule, self.choices.recompute
        if schedule is None:
            for one in self._pipelines(shape):
                self._push(self._pipeline_s(shape, one, recompute[0]), _Branch(shape, one))
        elif branch.first is not None:
            least_s = self._try(shape, branch.first)
            self._push_variants(shape, schedule, branch.variants[1:], least_s)
        elif branch.variants:  # a closer bound decides whether its turn has come
            job = job_of(shape, branch.variants[0], self.goal)
            plan_s, least_s = self.bounds.plan_s(shape, job)
            self._push(max(bound_s, least_s), branch._replace(first=_First(job, plan_s, least_s)))
        else:
            for zero in zero_stages(shape, self.choices):
                variants = tuple(Variant(*schedule, zero, again) for again in recompute)
                able = self.bounds.fitting(shape, variants, self.goal.memory_limit_bytes)
                self.too_large += len(variants) - len(able)
                self._push_variants(shape, schedule, able)

    def _push_variants(
        self,
        shape: JobShape,
        schedule: tuple[str, int | None],
        variants: tuple[Variant, ...],
        least_s: float = 0.0,
    ) -> None:
        if variants:
            bound_s = max(least_s, self._pipeline_s(shape, schedule, variants[0].recompute))
            self._push(bound_s, _Branch(shape, schedule, variants))

    def _try(self, shape: JobShape, first: _First) -> float:
        """Returns what no plan that recomputes more can be below."""
        job, bound_s, least_s = first
        if self._hopeless(bound_s, shape):
            return least_s
        limit = self.goal.memory_limit_bytes
        if least_memory_bytes(job) > limit or not fits_into(job, limit):
            self.too_large += 1
            return least_s
        bubble_s = self._time(shape, job) - bound_s
        return least_s and least_s + bubble_s

    def _time(self, shape: JobShape, job: TrainJob) -> float:
        """By playing its schedule."""
        self.timed += 1
        step_s = estimate(job, self.goal.cluster, self.bounds.profile, explain=False).step_s
        if step_s < min(self._best_s(shape), self.worst_kept_s):
            self.best[shape.mesh] = (step_s, job)
            if len(self.best) >= self.keep:
                self.worst_kept_s = sorted(found[0] for found in self.best.values())[self.keep - 1]
        return step_s

    def _pipelines(self, shape: JobShape) -> tuple[tuple[str, int | None], ...]:
        micro_batches = shape.micro_batches(self.goal.global_batch)
        return pipelines(shape.pp, micro_batches, self.goal.model.layers, self.choices)

    def _pipeline_s(self, shape: JobShape, schedule: tuple[str, int | None], recompute: Recompute) -> float:
        name, chunks = schedule
        return self.bounds.pipeline_s(shape, name, chunks or FAMILIES[name].chunks_per_stage, recompute)

    def _hopeless(self, bound_s: float, shape: JobShape) -> bool:
        """Whether nothing of this shape that takes `bound_s` or longer can change the result."""
        return bound_s * _SLACK >= min(self._best_s(shape), self.worst_kept_s)

    def _best_s(self, shape: JobShape) -> float:
        found = self.best.get(shape.mesh)
        return _NEVER if found is None else found[0]
