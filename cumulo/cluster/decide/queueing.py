"""The order in which waiting jobs are tried, and what happens behind one that does not fit. Most policies are an
order, a placer, and this loop.

    queue_policy(by_arrival, pack_gang, backfill=True)    # EASY backfill
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cumulo.cluster.decide.check import has_room
from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fifo import why_not
from cumulo.cluster.decide.fit import only_gpus, pack_gang, slots
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.queue import JobQueue, Shape, ordered, shape_key
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.releases import Releases, Start
from cumulo.cluster.decide.snapshot import Policy, Snapshot

Order = Callable[[Snapshot], Iterable[JobRequest]]
Placer = Callable[[JobRequest, FreeCapacity], tuple[TaskPlace, ...] | None]
_MOST_TRIED = (
    200  # jobs behind the first that does not fit: as Slurm's bf_max_job_test, so that a decision ends
)
_STRETCH = 10.0
_MOST_REASONS = 20  # jobs behind it that are told why they wait, in one decision


def by_arrival(snapshot: Snapshot) -> Iterable[JobRequest]:
    return snapshot.waiting


def by_prediction(snapshot: Snapshot) -> Iterable[JobRequest]:
    """Short jobs first; a job of unknown duration counts as an hour. Nobody starves: ten times its duration after
    its arrival a job is before everybody who arrives then."""
    return ordered(snapshot.waiting, _stretched)


def _stretched(job: JobRequest) -> float:
    return job.arrival_s + _STRETCH * (3600.0 if job.predicted_s is None else job.predicted_s)


def by_priority(snapshot: Snapshot) -> Iterable[JobRequest]:
    return ordered(snapshot.waiting, _urgent)


def _urgent(job: JobRequest) -> tuple[int, float]:
    return -job.priority, job.arrival_s


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
    start: Start | None  # of a gang of whole GPUs; others have the whole cluster at that moment instead
    free_then: FreeCapacity | None = None  # with the reserved job placed


@dataclass
class _Trial:
    """One decision while it is made. What it tries is taken back at its end."""

    snapshot: Snapshot
    place: Placer
    backfill: bool
    reservations: int
    reason: str
    decided: list[Decision] = field(default_factory=list)
    reserved: list[_Reservation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.snapshot.free
        self.releases = self.snapshot.releases
        self.book = QuotaBook(self.snapshot)
        self.started: list[RunningJob] = []
        self.failed: set[Shape] = set()  # what is free only shrinks: these never fit in this decision
        self.harmful: dict[Shape, float] = {}  # they delay a reserved job if they end after this moment

    def decide(self, ordered: Iterable[JobRequest]) -> list[Decision]:
        waiting = self.snapshot.waiting
        shapes = waiting.shapes if isinstance(waiting, JobQueue) else {}
        try:
            self._try_all(ordered, shapes)
        finally:
            self._take_back()
        return self.decided

    def _try_all(self, ordered: Iterable[JobRequest], shapes: dict[str, Shape]) -> None:
        behind, failed, harmful, now_s = 0, self.failed, self.harmful, self.snapshot.now_s
        for job in ordered:
            shape = shapes.get(job.job_id) or shape_key(job)
            if self.reserved:
                behind += 1
                if behind > _MOST_TRIED or (not self.free.free_gpus and not job.fractional):
                    break
                if shape in failed:
                    self._waits_too(job, behind)
                    continue
                if shape in harmful and (job.predicted_s is None or now_s + job.predicted_s > harmful[shape]):
                    continue
            refused = self.book.refuses(job)
            if refused is not None:
                self.decided.append(Waits(job.job_id, refused))
                continue
            places = None if shape in failed else self.place(job, self.free)
            if places is None:
                failed.add(shape)
                if not self.wait(job):
                    break
            elif self.harmless(job, shape, places):
                self.start(job, places)

    def _waits_too(self, job: JobRequest, behind: int) -> None:
        """A reason for the first that wait; the others have the same."""
        if behind < _MOST_REASONS:
            self.decided.append(Waits(job.job_id, why_not(job, self.free)))

    def _take_back(self) -> None:
        for one in self.started:
            self.free.give(one.request, one.places)
            if self.releases is not None:
                self.releases.give(one.request, one.places, one.expected_end_s)
        if self.releases is not None:
            self.releases.forget()

    def start(self, job: JobRequest, places: tuple[TaskPlace, ...]) -> None:
        now_s = self.snapshot.now_s
        ends_s = None if job.predicted_s is None else now_s + job.predicted_s
        if len(self.snapshot.waiting) > 1:  # else nobody looks again
            self.free.take(job, places)
            if self.releases is not None:
                self.releases.take(job, places, ends_s)
            self.started.append(RunningJob(job, places, now_s, ends_s))
            self.harmful.clear()
        self.book.count(job, job.gpus)
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
        found = self.reserve(job)
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

    def reserve(self, job: JobRequest) -> _Reservation | None:
        """The earliest start for a gang that does not fit now, when running jobs end as predicted."""
        if self.releases is None:
            self.releases = Releases(self.free, self.snapshot.running)
            for one in self.started:
                self.releases.take(one.request, one.places, one.expected_end_s)
        now_s = self.snapshot.now_s
        if only_gpus(job):
            start = self.releases.earliest(job)
            return None if start is None else _Reservation(job, max(start.at_s, now_s), start)
        found = _play_ends(job, self.snapshot, self.free, self.started, self.releases.by_end, self.place)
        return None if found is None else _Reservation(job, max(found[0], now_s), None, found[1])

    def harmless(self, job: JobRequest, shape: Shape, places: tuple[TaskPlace, ...]) -> bool:
        """Whether no reserved job starts later because of it: it ends before, or leaves it enough."""
        if not self.reserved:
            return True
        ends_s = float("inf") if job.predicted_s is None else self.snapshot.now_s + job.predicted_s
        late = [one for one in self.reserved if ends_s > one.start_s]
        for one in late:
            if not self._has_room(job, places, one):
                self.harmful[shape] = one.start_s
                self.decided.append(
                    Waits(job.job_id, f"it fits, but would delay {one.job.job_id}, which is before it")
                )
                return False
        for one in late:
            if one.free_then is not None:
                one.free_then.take(job, places)
        return True

    def _has_room(self, job: JobRequest, places: tuple[TaskPlace, ...], reserved: _Reservation) -> bool:
        if reserved.start is None:
            assert reserved.free_then is not None
            return has_room(job, places, reserved.free_then)
        assert self.releases is not None
        start = reserved.start
        return self.releases.lost(places, reserved.job, start.at_s) <= start.spare


def _play_ends(
    job: JobRequest,
    snapshot: Snapshot,
    free: FreeCapacity,
    started: Sequence[RunningJob],
    ends: Sequence[tuple[float, str]],
    place: Placer,
) -> tuple[float, FreeCapacity] | None:
    """The first moment at which a gang fits, and the cluster then: for jobs that ask for more than whole GPUs, end
    by end."""
    new = {one.job_id: one for one in started}
    then = free.copy()
    missing = job.tasks - slots(job, then)
    for number, (end_s, name) in enumerate(ends, 1):
        one = new.get(name) or snapshot.running[name]
        then.give(one.request, one.places)
        missing -= -(-one.tasks * max(1, one.request.gpus_per_task) // max(1, job.gpus_per_task))
        if missing > 0 and number < len(ends):
            continue  # cannot be enough yet
        places = place(job, then)
        if places is not None:
            then.take(job, places)
            return end_s, then
        missing = max(1, job.tasks - slots(job, then))
    return None
