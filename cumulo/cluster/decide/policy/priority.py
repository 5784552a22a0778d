"""Priorities: urgent jobs first, and they stop others where what they save is worth what the others lose."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement
from cumulo.cluster.decide.fit import Placer, only_gpus, tell_stopped
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import FreeCapacity, Ints
from cumulo.cluster.decide.policy.looks import Looks, is_costly, is_long
from cumulo.cluster.decide.policy.orders import by_priority
from cumulo.cluster.decide.policy.preemptible import (
    NodeCodes,
    PreemptibleUpTo,
    StateMark,
    coded_nodes,
    preemptible_on_nodes,
    preemptible_up_to,
)
from cumulo.cluster.decide.policy.preemption import MORE_NODES, RoomSearch, fits, watch_running
from cumulo.cluster.decide.policy.queueing import queue_policy
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.running import table_of
from cumulo.cluster.decide.shapes import GangShape, shape_key
from cumulo.cluster.decide.snapshot import Policy, SameState, Snapshot

_MOST_URGENT = 20  # for which others may be stopped, in one decision
_FEW_URGENT = 2  # the same between looks, where looking costs much
_MOST_IN_VAIN = 4096  # searches

Found = tuple[list[RunningJob], FreeCapacity]  # those that stop, and the cluster without them


def preempting(place: Placer) -> Policy:
    """Priorities: a job may stop those of lower priority, if what it saves is worth what they lose: a
    checkpoint each, counted in GPU seconds, against its waiting until one of them would have ended."""
    fill = queue_policy(by_priority, place, backfill=True, reason="the most urgent that fits")
    # Shapes for which nobody is stopped, up to this priority, and the state of the cluster in which that is so: as
    # long as nothing starts or ends, the same jobs would be found, and time alone makes stopping them worth less.
    hopeless: dict[GangShape, int] = {}
    of_state: SameState | None = None
    looks = Looks()
    in_vain: _SearchesInVain = {}

    def policy(snapshot: Snapshot) -> list[Decision]:
        nonlocal of_state
        if of_state is None or not of_state.holds(snapshot):
            hopeless.clear()
            of_state = SameState.noted(snapshot)
        book, lowest = QuotaBook(snapshot), min(table_of(snapshot.running).preemptible, default=None)
        watch_running(snapshot, _priority)
        up_to = preemptible_up_to(snapshot)
        up_to.catch_up(snapshot.free)
        few = looks.too_soon(snapshot.now_s) and is_long(snapshot.waiting)
        if not few:
            looks.begin(snapshot.now_s)
            looks.costly = is_costly(snapshot.waiting)
        many = _FEW_URGENT if few else _MOST_URGENT
        for job, shape, _, gpus, _ in itertools.islice(by_priority(snapshot), many):
            if lowest is None or job.priority <= lowest:
                break  # nor may any behind it
            known = hopeless.get(shape)
            if (known is not None and job.priority <= known) or not book.allows(job.tenant, gpus):
                continue
            found: Found | None = None
            if shape.only_gpus and not up_to.shares:
                missing = shape.tasks - snapshot.free.task_slots(shape.gpus_per_task, shape.devices)
                at = up_to.first_with_room(job, snapshot.free) if missing > 0 else None
                if at is not None:
                    found = _up_to_level(job, shape, missing, at, up_to, snapshot, in_vain)
            elif not fits(job, snapshot.free, place):
                found = _less_urgent(job, up_to, snapshot)
            if found is not None and (decided := _worth_it(job, *found, snapshot, place)):
                return decided
            hopeless[shape] = job.priority
        return fill(snapshot)

    return policy


def _priority(job: RunningJob) -> int:
    return job.request.priority


def _cheapest(one: RunningJob) -> tuple[float, ...]:
    return one.gpus * one.request.checkpoint_s, one.gpus, -one.started_s


@dataclass(slots=True)
class _InVain:
    """A search that found nothing, or nothing that was worth it. Time alone makes stopping others worth less."""

    missing: int
    first_nodes: NodeCodes
    looked_at: set[int]
    state: StateMark

    def holds(self, missing: int, first_nodes: NodeCodes, up_to: PreemptibleUpTo, free: FreeCapacity) -> bool:
        same = self.missing == missing and self.first_nodes == first_nodes
        if same and up_to.unchanged(self.looked_at, self.state, free):
            self.state = up_to.state(free)
            return True
        return False


_SearchesInVain = dict[tuple[int, GangShape], _InVain]


def _up_to_level(
    job: JobRequest,
    shape: GangShape,
    missing: int,
    at: int,
    up_to: PreemptibleUpTo,
    snapshot: Snapshot,
    in_vain: _SearchesInVain,
) -> Found | None:
    """The least urgent jobs that make room for the missing tasks, and among them those that lose least; None:
    waiting is cheaper. Where nobody has a share of a GPU there is room if all jobs up to the level of this number
    stop, and not before: no other level is searched, and the search ends as soon as it is not worth it."""
    level, free = up_to.levels[at], snapshot.free
    codes = up_to.codes_in_order(job, at, free, missing + MORE_NODES)
    last = in_vain.get((level, shape))
    if last is not None and last.holds(missing, codes, up_to, free):
        return None
    nodes = coded_nodes(codes)
    search = RoomSearch(
        job, snapshot, lambda: up_to.columns(level), lambda one, _: one.request.priority <= level, _cheapest,
        too_much=_Worth(job, snapshot.now_s).lost_with, kind=(level, job.gpus_per_task),
        first_nodes=lambda many: nodes,
    )  # fmt: skip
    found = search.find()
    if found is None and search.looked_at is not None:
        if len(in_vain) >= _MOST_IN_VAIN:
            in_vain.clear()
        in_vain[level, shape] = _InVain(missing, codes, search.looked_at, up_to.state(free))
    return found


def _less_urgent(job: JobRequest, up_to: PreemptibleUpTo, snapshot: Snapshot) -> Found | None:
    """As `_up_to_level`, level by level, where shares of GPUs, cores or memory are counted as well."""
    columns = preemptible_on_nodes(snapshot, _priority)
    counted = only_gpus(job)
    first = up_to.first_with_room(job, snapshot.free) if counted else 0
    if first is None:
        return None
    some: list[Ints] = []
    levels = sorted(level for level in columns if isinstance(level, int) and level < job.priority)
    for level in levels:
        if counted and level < up_to.levels[first]:
            continue  # up to here they are too few, wherever they are
        if not counted:
            some.append(columns[level])
        stoppable = up_to.columns(level) if counted else _sum(some, snapshot)
        search = RoomSearch(
            job, snapshot, lambda: stoppable, lambda one, _: one.request.priority <= level,  # noqa: B023
            _cheapest, kind=(level, shape_key(job)),
        )  # fmt: skip
        if level == levels[-1]:  # nobody else is asked after them: what is not worth it already never will be
            search.too_much = _Worth(job, snapshot.now_s).lost_with
        found = search.find()
        if found is not None:
            return found
    return None


def _sum(columns: list[Ints], snapshot: Snapshot) -> Ints:
    if len(columns) == 1:
        return columns[0]
    nothing: Ints = np.zeros((3, len(snapshot.nodes)), dtype=np.int64)
    return sum(columns, nothing)


class _Worth:
    """What the jobs lose that stop for another, against its waiting. With more of them it only becomes worse."""

    def __init__(self, job: JobRequest, now_s: float) -> None:
        self.job, self.now_s = job, now_s
        self.lost, self.first_end_s = 0.0, float("inf")

    def lost_with(self, more: Iterable[RunningJob]) -> bool:
        """Whether waiting is cheaper if these stop as well."""
        for one in more:
            self.lost += one.gpus * one.request.checkpoint_s
            if one.expected_end_s is not None:
                self.first_end_s = min(self.first_end_s, one.expected_end_s)
        return self.lost > self.job.gpus * max(0.0, self.first_end_s - self.now_s)


def _worth_it(
    job: JobRequest, chosen: list[RunningJob], free: FreeCapacity, snapshot: Snapshot, place: Placer
) -> list[Decision]:
    worth = _Worth(job, snapshot.now_s)
    if worth.lost_with(chosen):
        return []
    tell_stopped(place, chosen)
    places = place(job, free)
    if places is None:
        return []
    why = f"{job.job_id} has priority {job.priority}; the checkpoints cost {worth.lost:.0f} GPU seconds"
    return [
        *(Eviction(one.job_id, why) for one in chosen), JobPlacement(job.job_id, places, "its priority"),
    ]  # fmt: skip
