"""The order in which waiting jobs are tried, and what happens behind one that does not fit. Most policies are
an order, a placer, and this loop. With backfill, starts are reserved for jobs that do not fit now, and a job
behind them that would delay one of these starts waits.

    queue_policy(by_arrival, packed, backfill=True)    # EASY backfill
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fit import Placer, PlacerOf, Places, packed, slots, tasks_that_fit, why_not
from cumulo.cluster.decide.jobs import GangShape, JobRequest, RunningJob
from cumulo.cluster.decide.nodes import Flags, FreeCapacity
from cumulo.cluster.decide.quotas import QuotaBook, TenantUse, dominant_share, tenant_use
from cumulo.cluster.decide.snapshot import Policy, Snapshot


@dataclass(frozen=True, slots=True)
class Reservation:
    """`then`: what is free at that moment, beside the jobs that run then and those that the decision starts."""

    job: JobRequest
    start_s: float
    then: FreeCapacity

    def delayed_by(self, job: JobRequest, places: Places) -> bool:
        """Whether it could not start in time if another job still had these places then."""
        self.then.allocate(job, places)
        delayed = slots(self.job, self.then) < self.job.tasks
        self.then.release(job, places)
        return delayed

    def of_no_use(self) -> Flags:
        """The nodes that cannot take a task of it then anyway."""
        found: Flags = tasks_that_fit(self.job, self.then) == 0
        return found


def reserve(
    job: JobRequest, free: FreeCapacity, running: Iterable[RunningJob], now_s: float
) -> Reservation | None:
    """The earliest start of a gang that does not fit now, if jobs end as predicted; None: nobody knows it."""
    ends = sorted(
        ((one.expected_end_s, one) for one in running if one.expected_end_s is not None), key=itemgetter(0)
    )
    then, room = free.copy(), slots(job, free)
    for end_s, some in itertools.groupby(ends, itemgetter(0)):
        for _, one in some:
            nodes = then.numbers(one.places)
            room -= int(tasks_that_fit(job, then, nodes).sum())
            then.release(one.request, one.places)
            room += int(tasks_that_fit(job, then, nodes).sum())
        if room >= job.tasks:
            return Reservation(job, max(end_s, now_s), then)
    return None


MOST_REASONS = 100  # jobs that are told why they wait, in one decision
_STRETCH, _UNKNOWN_S = 10.0, 3600.0

Order = Callable[[Snapshot], Iterable[JobRequest]]


def by_arrival(snapshot: Snapshot) -> Iterable[JobRequest]:
    return snapshot.waiting


def by_prediction(snapshot: Snapshot) -> Iterable[JobRequest]:
    """Short jobs first; a job of unknown duration counts as an hour. Nobody starves: ten times its duration after
    its arrival a job is before everybody who arrives then."""
    return sorted(
        snapshot.waiting,
        key=lambda job: (
            job.arrival_s + _STRETCH * (_UNKNOWN_S if job.predicted_s is None else job.predicted_s)
        ),
    )


def by_priority(snapshot: Snapshot) -> Iterable[JobRequest]:
    return sorted(snapshot.waiting, key=lambda job: (-job.priority, job.arrival_s))


def by_share(snapshot: Snapshot) -> Iterator[JobRequest]:
    """Jobs one by one from the tenant with the smallest weighted dominant share. What is tried counts as had, so
    that a tenant whose job does not fit does not hold up all others."""
    nodes = snapshot.nodes
    total = TenantUse(
        max(1, sum(node.gpus for node in nodes)) * 1000, max(1, sum(node.cpu_milli for node in nodes))
    )
    use, lines = tenant_use(snapshot), dict[str, Iterator[JobRequest]]()
    by_tenant: dict[str, list[JobRequest]] = {}
    for job in snapshot.waiting:
        by_tenant.setdefault(job.tenant, []).append(job)
    weights = {name: snapshot.quotas[name].weight if name in snapshot.quotas else 1.0 for name in by_tenant}
    first: list[tuple[float, float, str, JobRequest]] = []

    def push(tenant: str) -> None:
        job = next(lines[tenant], None)
        if job is not None:
            share = dominant_share(use[tenant], total, weights[tenant])
            heapq.heappush(first, (share, job.arrival_s, tenant, job))

    for tenant, jobs in by_tenant.items():
        lines[tenant] = iter(jobs)
        use.setdefault(tenant, TenantUse())
        push(tenant)
    while first:
        _, _, tenant, job = heapq.heappop(first)
        yield job
        use[tenant].add(job, job.tasks)
        push(tenant)


def queue_policy(
    order: Order = by_arrival,
    place: PlacerOf = packed,
    backfill: bool = False,
    reservations: int = 1,
    reason: str = "its turn, and its whole gang fits",
) -> Policy:
    """Jobs are placed in `order` until one does not fit. With `backfill` later ones may start too, if they end
    before the start reserved for it (EASY, Lifka 1995). `reservations`: for how many jobs a start is reserved;
    with a large number no job is delayed by one behind it (conservative, Mu'alem and Feitelson 2001)."""

    def policy(snapshot: Snapshot) -> list[Decision]:
        if not snapshot.waiting:
            return []
        trial = _Trial(snapshot, place(snapshot), reservations if backfill else 0, reason)
        for job in order(snapshot):
            if not trial.try_job(job):
                break
        return trial.decided

    return policy


fifo = queue_policy(reason="first in the queue, and its whole gang fits")


class _Trial:
    """One decision while it is made."""

    def __init__(self, snapshot: Snapshot, placer: Placer, reservations: int, reason: str) -> None:
        self.snapshot, self.placer, self.reservations, self.reason = snapshot, placer, reservations, reason
        self.free, self.book = snapshot.free.copy(), QuotaBook(snapshot)
        self.running = list(snapshot.running.values())  # with those that it starts
        self.decided: list[Decision] = []
        self.reserved: list[Reservation] = []
        self.told = 0
        # Why jobs of these shapes do not start. What is free only shrinks, so that what does not fit stays so; what
        # would delay a reserved job if it ends after this moment is tried again after each start.
        self.failed: dict[GangShape, str] = {}
        self.harmful: dict[GangShape, tuple[float, str]] = {}

    def try_job(self, job: JobRequest) -> bool:
        """Starts a job if it may start, fits, and delays nobody; whether those behind it may be tried."""
        shape = job.shape
        if shape in self.failed:
            self.tell(job, self.failed[shape])
            return True
        ends_s = self.ends_s(job)
        if self.harmful and ends_s > (known := self.harmful.get(shape, (float("inf"), "")))[0]:
            self.tell(job, known[1])
            return True
        refused = self.book.refuses(job)
        if refused is not None:
            self.tell(job, refused)
            return True
        places = self.placer.places(job, self.free)
        if places is None:
            return self.wait(job)
        late = [one for one in self.reserved if ends_s > one.start_s]
        harmed = self.first_delayed(late, job, places)
        if harmed is not None:
            elsewhere = self.placer.places(job, self.free.among(harmed.of_no_use()))
            if elsewhere is not None:
                places, harmed = elsewhere, self.first_delayed(late, job, elsewhere)
        if harmed is not None:
            why = f"it fits, but would delay {harmed.job.job_id}, which is before it"
            self.harmful[shape] = harmed.start_s, why
            self.tell(job, why)
        else:
            self.start(job, places, late)
        return True

    def ends_s(self, job: JobRequest) -> float:
        return float("inf") if job.predicted_s is None else self.snapshot.now_s + job.predicted_s

    def first_delayed(self, late: list[Reservation], job: JobRequest, places: Places) -> Reservation | None:
        return next((one for one in late if one.delayed_by(job, places)), None)

    def start(self, job: JobRequest, places: Places, late: list[Reservation]) -> None:
        self.free.allocate(job, places)
        for one in late:
            one.then.allocate(job, places)
        ends_s = None if job.predicted_s is None else self.ends_s(job)
        self.running.append(RunningJob(job, places, self.snapshot.now_s, ends_s))
        self.harmful.clear()
        self.placer.started(job, places)
        self.book.count(job, job.gpus)
        why = self.reason if not self.reserved else f"it ends before {self.reserved[0].job.job_id} can start"
        chosen = self.placer.why(job)
        self.decided.append(JobPlacement(job.job_id, places, f"{why}; {chosen}" if chosen else why))

    def wait(self, job: JobRequest) -> bool:
        """A job that does not fit; whether those behind it may be tried."""
        reason = self.failed[job.shape] = why_not(job, self.free)
        if len(self.reserved) >= self.reservations:
            self.tell(job, reason)
            return bool(self.reservations)
        found = reserve(job, self.free, self.running, self.snapshot.now_s)
        if found is None:
            self.tell(job, reason)
            return False  # nobody knows when it could start, so nobody overtakes it
        self.reserved.append(found)
        ahead_s = found.start_s - self.snapshot.now_s
        when = f"it starts in {ahead_s:.0f} s at the latest, if predictions hold"
        if ahead_s < 1:
            when = "jobs before it run longer than predicted"
        self.decided.append(Waits(job.job_id, f"{reason}; {when}", found.start_s))
        return True

    def tell(self, job: JobRequest, reason: str) -> None:
        self.told += 1
        if self.told <= MOST_REASONS:
            self.decided.append(Waits(job.job_id, reason))
