"""The search for the best training plan: exact over the space of `space`. `cumulo plan train` calls it.

Branch and bound, best first. A shape (sizes of all axes and the micro-batch) is bounded by the arithmetic of one
rank, which no schedule avoids; a pipeline also by how long its stages wait to begin; a plan by the cost model's own
lower bound. Only plans that fit into memory and may still win are
timed by playing their schedule. Plans that differ in their recomputation only are tried from little to much: more
of it never shortens the pipeline.

No bound is ever above the time it bounds, so the best plan found is the best of the space (a test compares with
trying all).
"""

import gc
import heapq
import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from cumulo.pipeline.decide.catalog import FAMILIES
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.ledger import TrainEstimate
from cumulo.plan.memory.peak import fits_into, peak_memory
from cumulo.plan.search.bounds import Bounds
from cumulo.plan.search.space import (
    Choices,
    JobShape,
    TrainGoal,
    Variant,
    ZeroStage,
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


@dataclass(frozen=True, slots=True)
class _Branch:
    """All plans of a shape; with a schedule, those that have it; with a variant, that one and those that differ
    from it only in recomputing more; with a job, the same, and the bound was worked out for this job."""

    shape: JobShape
    schedule: str | None = None
    chunks_per_stage: int | None = None
    variant: Variant | None = None
    job: TrainJob | None = None


@lru_cache(2)
def _bounds(goal: TrainGoal, profile: Profile) -> Bounds:
    """Searches that differ in how much memory there is share what is known of their shapes."""
    return Bounds(goal, profile)


class _Search:
    """The state of one search."""

    def __init__(self, goal: TrainGoal, choices: Choices, keep: int, faster_than_s: float) -> None:
        self.goal, self.choices, self.keep, self.most = goal, choices, keep, len(choices.recompute)
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
            self.enumerated += ways * len(self._zero_stages(shape)) * len(self.choices.recompute)
            if ways:
                self._push(self.bounds.shape_s(shape), _Branch(shape))
        while self.queue:
            bound_s, _, branch = heapq.heappop(self.queue)
            if bound_s * _SLACK >= self.worst_kept_s:
                break  # and so are all after it
            if self._hopeless(bound_s, branch.shape):
                continue
            if branch.variant is not None:
                self._try(branch.shape, branch.variant, branch.job)
            elif branch.schedule is not None:
                for zero in self._zero_stages(branch.shape):
                    first = Variant(branch.schedule, branch.chunks_per_stage, zero, self.choices.recompute[0])
                    self._push_variant(branch.shape, first)
            else:
                self._branch_by_schedule(branch.shape)
        ranked = sorted(self.best.values(), key=lambda found: found[0])[: self.keep]
        plans = tuple(timed(job, self.goal) for _, job in ranked)
        return SearchResult(plans, self.enumerated, self.too_large, self.timed)

    def _push(self, bound_s: float, branch: _Branch) -> None:
        heapq.heappush(self.queue, (bound_s, next(self.order), branch))

    def _branch_by_schedule(self, shape: JobShape) -> None:
        for schedule, chunks in self._pipelines(shape):
            each = chunks or FAMILIES[schedule].chunks_per_stage
            bound_s = self.bounds.pipeline_s(shape, schedule, each, self.choices.recompute[0])
            if not self._hopeless(bound_s, shape):
                self._push(bound_s, _Branch(shape, schedule, chunks))

    def _push_variant(self, shape: JobShape, variant: Variant | None, least_s: float = 0.0) -> None:
        """The first that may fit into memory, of this and those that recompute more; all take `least_s`."""
        if variant is None or least_s >= _SLACK * self._best_s(shape):
            return
        ways = self.choices.recompute[self.choices.recompute.index(variant.recompute) :]
        skipped = self.bounds.too_large(shape, variant, ways, self.goal.memory_limit_bytes)
        self.too_large += skipped
        if skipped < len(ways):
            variant = variant._replace(recompute=ways[skipped])
            each = variant.chunks_per_stage or FAMILIES[variant.schedule].chunks_per_stage
            bound_s = self.bounds.pipeline_s(shape, variant.schedule, each, variant.recompute)
            if not self._hopeless(max(bound_s, least_s), shape):
                self._push(max(bound_s, least_s), _Branch(shape, variant=variant))

    def _recompute_more(self, variant: Variant) -> Variant | None:
        later = self.choices.recompute.index(variant.recompute) + 1
        return variant._replace(recompute=self.choices.recompute[later]) if later < self.most else None

    def _try(self, shape: JobShape, variant: Variant, job: TrainJob | None) -> None:
        if job is None:  # a closer bound decides whether its turn has come
            # What recomputes more takes longer, but more can travel behind it: as much as behind the last choice.
            job = job_of(shape, variant, self.goal)
            most = self.choices.recompute[-1]
            bound_s = self.bounds.schedule_s(shape, job) + self.bounds.beside_s(shape, job, most)
            if not self._hopeless(bound_s, shape):
                self._push(bound_s, _Branch(shape, variant=variant, job=job))
            return
        least_s, limit = 0.0, self.goal.memory_limit_bytes
        if not self._hopeless(self.bounds.plan_s(shape, job), shape):
            if self.bounds.closer_memory_bytes(shape, variant) > limit or not fits_into(job, limit):
                self.too_large += 1
            else:
                least_s = self._time(shape, job)
        self._push_variant(shape, self._recompute_more(variant), least_s)

    def _time(self, shape: JobShape, job: TrainJob) -> float:
        """By playing its schedule. Returns what no plan that recomputes more can be below: its pipeline takes as
        long, and behind the last choice's layers more can travel than behind any other's."""
        self.timed += 1
        step_s = estimate(job, self.goal.cluster, self.bounds.profile, explain=False).step_s
        if step_s < min(self._best_s(shape), self.worst_kept_s):
            self.best[shape.mesh] = (step_s, job)
            if len(self.best) >= self.keep:
                self.worst_kept_s = sorted(found[0] for found in self.best.values())[self.keep - 1]
        if self.goal.offload_activations:  # the more is recomputed, the less there is to move
            return 0.0
        pipeline_s = step_s - (self.bounds.plan_s(shape, job) - self.bounds.schedule_s(shape, job))
        return pipeline_s + self.bounds.beside_s(shape, job, self.choices.recompute[-1])

    def _pipelines(self, shape: JobShape) -> tuple[tuple[str, int | None], ...]:
        micro_batches = shape.micro_batches(self.goal.global_batch)
        return pipelines(shape.pp, micro_batches, self.goal.model.layers, self.choices)

    def _zero_stages(self, shape: JobShape) -> tuple[ZeroStage, ...]:
        return zero_stages(shape, self.choices)

    def _hopeless(self, bound_s: float, shape: JobShape) -> bool:
        """Whether nothing of this shape that takes `bound_s` or longer can change the result."""
        return bound_s * _SLACK >= min(self._best_s(shape), self.worst_kept_s)

    def _best_s(self, shape: JobShape) -> float:
        found = self.best.get(shape.mesh)
        return _NEVER if found is None else found[0]
