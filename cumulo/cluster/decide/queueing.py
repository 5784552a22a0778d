"""The order in which waiting jobs are tried, and what happens behind one that does not fit. Most policies are an
order, a placer, and this loop.

    queue_policy(by_arrival, pack_gang, backfill=True)    # EASY backfill
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fifo import why_not
from cumulo.cluster.decide.fit import pack_gang, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

Order = Callable[[Snapshot], Iterable[JobRequest]]
Placer = Callable[[JobRequest, FreeCapacity], tuple[TaskPlace, ...] | None]
_MOST_TRIED = (
    200  # jobs behind the first that does not fit: as Slurm's bf_max_job_test, so that a decision ends
)


def by_arrival(snapshot: Snapshot) -> Iterable[JobRequest]:
    return snapshot.waiting


def by_prediction(snapshot: Snapshot, stretch: float = 10.0) -> Iterable[JobRequest]:
    """Short jobs first; a job of unknown duration counts as an hour. Nobody starves: `stretch` times its duration
    after its arrival a job is before everybody who arrives then."""
    return sorted(snapshot.waiting, key=lambda job: job.arrival_s + stretch * _predicted_s(job))


def by_priority(snapshot: Snapshot) -> Iterable[JobRequest]:
    return sorted(snapshot.waiting, key=lambda job: (-job.priority, job.arrival_s))


def _predicted_s(job: JobRequest) -> float:
    return 3600.0 if job.predicted_s is None else job.predicted_s


def queue_policy(
    order: Order = by_arrival,
    place: Placer = pack_gang,
    backfill: bool = False,
    reservations: int = 1,
    reason: str = "its turn, and its whole gang fits",
) -> Policy:
    """Jobs are placed in `order` until one does not fit. With `backfill` later ones may start too, if they end
    before the start reserved for it (EASY, Lifka 1995). `reservations`: for how many jobs a start is reserved;
    with a large number no job is delayed by one behind it (conservative, Mu'alem and Feitelson 2001)."""

    def policy(snapshot: Snapshot) -> list[Decision]:
        return _Trial(snapshot, place, backfill, reservations, reason).decide(order(snapshot))

    return policy


@dataclass(slots=True)
class _Reservation:
    job: JobRequest
    start_s: float
    free_then: FreeCapacity  # at that moment, with the reserved job placed


@dataclass
class _Trial:
    """One decision while it is made."""

    snapshot: Snapshot
    place: Placer
    backfill: bool
    reservations: int
    reason: str
    decided: list[Decision] = field(default_factory=list)
    reserved: list[_Reservation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.snapshot.free
        self.started: list[RunningJob] = []
        self.book = QuotaBook(self.snapshot)
        self.bound: tuple[int, int] | None = None  # GPUs free on the emptiest node, and on all

    def decide(self, ordered: Iterable[JobRequest]) -> list[Decision]:
        behind = 0
        for job in ordered:
            if behind > _MOST_TRIED or (self.reserved and not self.free.whole.any() and not job.fractional):
                break
            if self.reserved:
                behind += 1
                if self.too_large(job):
                    continue  # a glance instead of a search: behind a job that waits, most do not fit
            refused = self.book.refuses(job)
            if refused is not None:
                self.decided.append(Waits(job.job_id, refused))
                continue
            places = self.place(job, self.free)
            if places is None:
                if not self.wait(job):
                    break
            elif self.harmless(job, places):
                self.start(job, places)
        return self.decided

    def too_large(self, job: JobRequest) -> bool:
        """Whether a job cannot fit, whatever the nodes look like in detail."""
        if self.bound is None:
            self.bound = int(self.free.whole.max()), int(self.free.whole.sum())
        most, total = self.bound
        return not job.fractional and (job.gpus_per_task > most or job.tasks * job.gpus_per_task > total)

    def start(self, job: JobRequest, places: tuple[TaskPlace, ...]) -> None:
        if len(self.snapshot.waiting) > 1:  # else nobody looks again
            if self.free is self.snapshot.free:
                self.free = self.free.copy()
            self.free.take(job, places)
            self.bound = None
        self.book.count(job, job.gpus)
        now = self.snapshot.now_s
        self.started.append(
            RunningJob(job, places, now, None if job.predicted_s is None else now + job.predicted_s)
        )
        why = self.reason if not self.reserved else f"it ends before {self.reserved[0].job.job_id} can start"
        told = getattr(self.place, "why", {}).get(job.job_id)  # a placer that chose between ways says why
        why = f"{why}; {told}" if told else why
        self.decided.append(JobPlacement(job.job_id, places, why))

    def wait(self, job: JobRequest) -> bool:
        """Whether jobs behind this one may be tried."""
        reason = why_not(job, self.free)
        if not self.backfill:
            self.decided.append(Waits(job.job_id, reason))
            return False
        if len(self.reserved) >= self.reservations:
            self.decided.append(Waits(job.job_id, reason))
            return True
        found = _reserve(job, self.snapshot, self.free, self.started, self.place)
        if found is None:
            self.decided.append(Waits(job.job_id, reason))
            return False  # nobody knows when it could start, so nobody overtakes it
        self.reserved.append(found)
        ahead_s = found.start_s - self.snapshot.now_s
        when = f"it starts in {ahead_s:.0f} s at the latest, if predictions hold"
        if ahead_s < 1:
            when = "jobs before it run longer than predicted"
        self.decided.append(Waits(job.job_id, f"{reason}; {when}", found.start_s))
        return True

    def harmless(self, job: JobRequest, places: tuple[TaskPlace, ...]) -> bool:
        """Whether no reserved job starts later because of it: it ends before, or leaves it enough."""
        ends_s = float("inf") if job.predicted_s is None else self.snapshot.now_s + job.predicted_s
        late = [one for one in self.reserved if ends_s > one.start_s]
        for one in late:
            if not _has_room(job, places, one.free_then):
                self.decided.append(
                    Waits(job.job_id, f"it fits, but would delay {one.job.job_id}, which is before it")
                )
                return False
        for one in late:
            one.free_then.take(job, places)
        return True


def _has_room(job: JobRequest, places: Sequence[TaskPlace], free: FreeCapacity) -> bool:
    after = free.copy()
    after.take(job, places)
    numbers = [after.index[place.node] for place in places]
    return bool(
        (after.gpu_milli[numbers] >= 0).all()
        and (after.cpu_milli[numbers] >= 0).all()
        and (after.memory_mib[numbers] >= 0).all()
    )


def _reserve(
    job: JobRequest, snapshot: Snapshot, free: FreeCapacity, started: Sequence[RunningJob], place: Placer
) -> _Reservation | None:
    """The earliest start for a gang that does not fit now, when running jobs end as predicted."""
    if snapshot.by_end is None:
        known = sorted(
            (one.expected_end_s, one.job_id) for one in snapshot.running.values() if one.expected_end_s
        )
    else:
        known = snapshot.by_end  # type: ignore[assignment]
    new = {one.job_id: one for one in started}
    soon = sorted((one.expected_end_s, one.job_id) for one in started if one.expected_end_s is not None)
    ends = heapq.merge(known, soon)
    last = len(known) + len(soon)
    then = free.copy()
    missing = job.tasks - int(tasks_that_fit(job, then).sum())
    for number, (end_s, name) in enumerate(ends, 1):
        one = new.get(name) or snapshot.running[name]
        then.give(one.request, one.places)
        missing -= -(-one.tasks * max(1, one.request.gpus_per_task) // max(1, job.gpus_per_task))
        if missing > 0 and number < last:
            continue  # cannot be enough yet
        places = place(job, then)
        if places is not None:
            then.take(job, places)
            return _Reservation(job, max(end_s or 0.0, snapshot.now_s), then)
        missing = max(1, job.tasks - int(tasks_that_fit(job, then).sum()))
    return None
