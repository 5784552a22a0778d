"""Room for a gang by stopping others: node by node, where the least has to stop. Urgent jobs make room for
themselves where that pays. Between tenants, the one with the least of its dominant resource is next (DRF, Ghodsi
et al., NSDI 2011), within quotas, with borrowing of what others leave unused, and reclaiming when they come back.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement
from cumulo.cluster.decide.fit import Placer, PlacerOf, slots, tasks_that_fit
from cumulo.cluster.decide.jobs import GangShape, JobRequest, RunningJob
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.queueing import by_priority, by_share, queue_policy
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_MOST_URGENT = 20  # jobs for which others may be stopped, in one decision
_MOST_NODES = 16  # that are priced for each missing task
_MOST_TRIED = 200  # waiting jobs of tenants below their quotas
_LITTLE = 1e-9

Found = tuple[list[RunningJob], FreeCapacity]  # those that stop, and the cluster without them
Level = tuple[int, FreeCapacity]  # a priority, and the cluster if all running jobs up to it stopped


def jobs_on_nodes(free: FreeCapacity, jobs: Iterable[RunningJob]) -> dict[int, list[RunningJob]]:
    found: dict[int, list[RunningJob]] = {}
    for one in jobs:
        for node in free.numbers(one.places):
            found.setdefault(node, []).append(one)
    return found


@dataclass(slots=True)
class RoomSearch:
    """`on`: the jobs of each node that may be stopped. `price`: of stopping a job; the cheapest is stopped first,
    by the first number, then by the last one.
    `may_stop`: whether a job may be stopped besides those that are stopped already. `without`: the cluster if all
    stopped that may."""

    job: JobRequest
    free: FreeCapacity
    on: Mapping[int, list[RunningJob]]
    price: Callable[[RunningJob], tuple[float, ...]]
    may_stop: Callable[[RunningJob, list[RunningJob]], bool]
    without: FreeCapacity
    _then: FreeCapacity = field(init=False)
    _chosen: list[RunningJob] = field(default_factory=list)

    def find(self) -> Found | None:
        """Jobs to stop, none that is not needed on its node, and the cluster without them; None: no room."""
        job = self.job
        self._then = self.free.copy()
        while slots(job, self._then) < job.tasks:
            priced = []
            for node in self._candidates()[:_MOST_NODES]:
                if victims := self._victims(node):
                    prices = [self.price(one) for one in victims]
                    cost, next_cost = sum(price[0] for price in prices), sum(price[-1] for price in prices)
                    priced.append((cost, next_cost, node, victims))
            if not priced:
                return None
            for one in min(priced, key=lambda priced: priced[:3])[-1]:
                self._chosen.append(one)
                self._then.release(one.request, one.places)
        return self._chosen, self._then

    def _candidates(self) -> list[int]:
        """Nodes that have room for a task more if all stopped that may; where the fewest GPUs are missing first."""
        job, free = self.job, self._then
        found = np.flatnonzero(tasks_that_fit(job, self.without) > tasks_that_fit(job, free))
        if job.fractional or not job.gpus_per_task:
            need = np.maximum(0, job.milli_per_task - free.gpu_milli[found].sum(axis=1))
        else:
            need = job.gpus_per_task - free.whole[found] % job.gpus_per_task
        return found[np.argsort(need, kind="stable")].tolist()  # type: ignore[no-any-return]

    def _victims(self, node: int) -> list[RunningJob]:
        """The cheapest jobs of a node without which it has room for one task more than now."""
        chosen = self._chosen
        stopped = {one.job_id for one in chosen}
        there = [
            one for one in self.on.get(node, ()) if one.job_id not in stopped and self.may_stop(one, chosen)
        ]
        there.sort(key=lambda one: (*self.price(one), one.job_id))
        before, taken = self._tasks(node), list[RunningJob]()
        enough = False
        for one in there:
            if taken and not self.may_stop(one, chosen + taken):
                continue
            self._move(one, node, 1)
            taken.append(one)
            enough = self._tasks(node) > before
            if enough:
                break
        needed = list(taken) if enough else []
        for one in needed[:-1]:
            self._move(one, node, -1)
            if self._tasks(node) > before:
                needed.remove(one)
                taken.remove(one)
            else:
                self._move(one, node, 1)
        for one in taken:
            self._move(one, node, -1)
        return needed

    def _tasks(self, node: int) -> int:
        return int(tasks_that_fit(self.job, self._then, [node])[0])

    def _move(self, one: RunningJob, node: int, sign: int) -> None:
        """Takes the tasks that a job has on this node off it (1), or puts them back (-1)."""
        name = self._then.nodes[node].name
        places = [place for place in one.places if place.node == name]
        (self._then.release if sign > 0 else self._then.allocate)(one.request, places)


def preempting(place: PlacerOf) -> Policy:
    """Priorities: a job may stop those of lower priority, if what it saves is worth what they lose: a
    checkpoint each, counted in GPU seconds, against its waiting until one of them would have ended."""
    fill = queue_policy(by_priority, place, backfill=True, reason="the most urgent that fits")

    def policy(snapshot: Snapshot) -> list[Decision]:
        return _preempt(snapshot, place(snapshot)) or fill(snapshot)

    return policy


def _preempt(snapshot: Snapshot, placer: Placer) -> list[Decision]:
    """For the first of the most urgent jobs for which it pays."""
    free = snapshot.free
    running = [one for one in snapshot.running.values() if one.request.preemptible]
    running.sort(key=lambda one: one.request.priority)
    urgent = [job for job in snapshot.waiting if running and job.priority > running[0].request.priority]
    urgent.sort(key=lambda job: (-job.priority, job.arrival_s))
    if not urgent:
        return []
    book, tried = QuotaBook(snapshot), set[GangShape]()
    on, levels, without = jobs_on_nodes(free, running), list[Level](), free
    for priority, some in itertools.groupby(running, key=lambda one: one.request.priority):
        without = without.without(some)
        levels.append((priority, without))
    for job in urgent[:_MOST_URGENT]:
        if job.shape in tried or book.refuses(job) is not None:
            continue
        tried.add(job.shape)
        if slots(job, free) >= job.tasks:
            continue
        found = _least_urgent(job, free, levels, on)
        if found is not None and (decided := _worth_it(job, *found, snapshot, placer)):
            return decided
    return []


def _least_urgent(
    job: JobRequest, free: FreeCapacity, levels: Sequence[Level], on: Mapping[int, list[RunningJob]]
) -> Found | None:
    """The least urgent jobs that make room, and among them those that lose least."""
    for priority, without in levels:
        if priority >= job.priority:
            break
        if slots(job, without) < job.tasks:
            continue  # up to this priority they are too few

        def may_stop(one: RunningJob, _: list[RunningJob], most: int = priority) -> bool:
            return one.request.priority <= most

        found = RoomSearch(job, free, on, _cheapest, may_stop, without).find()
        if found is not None:
            return found
    return None


def _cheapest(one: RunningJob) -> tuple[float, ...]:
    return one.gpus * one.request.checkpoint_s, one.gpus, -one.started_s


def _worth_it(
    job: JobRequest, chosen: list[RunningJob], free: FreeCapacity, snapshot: Snapshot, placer: Placer
) -> list[Decision]:
    """What the jobs lose that stop for another, against its waiting until the first of them would have ended."""
    lost = sum(one.gpus * one.request.checkpoint_s for one in chosen)
    ends_s = [one.expected_end_s for one in chosen if one.expected_end_s is not None]
    if lost > job.gpus * max(0.0, min(ends_s, default=float("inf")) - snapshot.now_s):
        return []
    for one in chosen:
        placer.stopped(one.request, one.places)
    places = placer.places(job, free)
    assert places is not None  # there is room
    why = f"{job.job_id} has priority {job.priority}; the checkpoints cost {lost:.0f} GPU seconds"
    return [
        *(Eviction(one.job_id, why) for one in chosen), JobPlacement(job.job_id, places, "its priority"),
    ]  # fmt: skip


def fair(place: PlacerOf) -> Policy:
    """The order of shares with backfill, and reclaiming: a tenant below its quota gets back what others borrowed,
    the youngest borrower first, because it loses least."""
    fill = queue_policy(by_share, place, backfill=True, reason="its tenant has the least")

    def policy(snapshot: Snapshot) -> list[Decision]:
        reclaimed = _reclaim(snapshot, place(snapshot)) if snapshot.quotas and snapshot.waiting else []
        return reclaimed or fill(snapshot)

    return policy


def _reclaim(snapshot: Snapshot, placer: Placer) -> list[Decision]:
    """For the first job that its tenant's quota guarantees and that fits with what others borrowed."""
    book = QuotaBook(snapshot)
    below = [name for name in snapshot.quotas if book.over(name) < 0]
    borrowing = {name for name in snapshot.quotas if book.over(name) > _LITTLE}
    if not below or not borrowing:
        return []
    order = {name: number for number, name in enumerate(snapshot.quotas)}
    guaranteed = [job for job in snapshot.waiting if job.tenant in below]
    guaranteed.sort(key=lambda job: (job.arrival_s, order[job.tenant]))
    tried: set[tuple[str, GangShape]] = set()
    running = snapshot.running.values()
    borrowers = [one for one in running if one.request.preemptible and one.request.tenant in borrowing]
    without, on = None, jobs_on_nodes(snapshot.free, borrowers)

    def may_stop(one: RunningJob, chosen: list[RunningJob]) -> bool:
        """Whether a stop brings its tenant back to its quota."""
        tenant = one.request.tenant
        back = sum(other.gpus for other in chosen if other.request.tenant == tenant)
        return book.over(tenant) - back > _LITTLE

    for job in guaranteed[:_MOST_TRIED]:
        if job.gpus > _LITTLE - book.over(job.tenant) or (job.tenant, job.shape) in tried:
            continue
        tried.add((job.tenant, job.shape))
        if slots(job, snapshot.free) >= job.tasks:
            return []  # it fits without
        without = without or snapshot.free.without(borrowers)
        found = RoomSearch(job, snapshot.free, on, lambda one: (-one.started_s,), may_stop, without).find()
        if found is None:
            continue
        for one in found[0]:
            placer.stopped(one.request, one.places)
        places = placer.places(job, found[1])
        assert places is not None  # there is room
        why = f"its tenant borrowed GPUs that tenant {job.tenant} is guaranteed"
        return [
            *(Eviction(one.job_id, why) for one in found[0]),
            JobPlacement(job.job_id, places, "guaranteed by its tenant's quota"),
        ]
    return []
