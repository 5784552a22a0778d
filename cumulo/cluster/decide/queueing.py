"""The order in which waiting jobs are tried, and what happens behind one that does not fit. Most policies are an
order, a placer, and this loop.

    queue_policy(by_arrival, pack_gang, backfill=True)    # EASY backfill
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cumulo.cluster.decide.check import has_room
from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fifo import why_not
from cumulo.cluster.decide.fit import only_gpus, pack_gang, slots
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.queue import JobQueue, ShapeNumbers, SortKey, by_arrival_key, ordered
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.releases import Releases, Start
from cumulo.cluster.decide.snapshot import Policy, Snapshot

Order = Callable[[Snapshot], Iterable[JobRequest]]
Placer = Callable[[JobRequest, FreeCapacity], tuple[TaskPlace, ...] | None]
_MOST_TRIED = (
    200  # jobs behind the first that does not fit: as Slurm's bf_max_job_test, so that a decision ends
)
_MOST_SHAPES = 32  # that are looked at before single jobs are
_STRETCH = 10.0
_MOST_REASONS = 20  # jobs behind it that are told why they wait, in one decision
_LONG_QUEUE = 200  # of a queue that is longer, only those that were tried are told


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


_KEYS: dict[Order, SortKey] = {by_arrival: by_arrival_key, by_prediction: _stretched, by_priority: _urgent}


def queue_policy(
    order: Order = by_arrival,
    place: Placer = pack_gang,
    backfill: bool = False,
    reservations: int = 1,
    reason: str = "its turn, and its whole gang fits",
    by_tenant: bool = False,
) -> Policy:
    """Jobs are placed in `order` until one does not fit. With `backfill` later ones may start too, if they end
    before the start reserved for it (EASY, Lifka 1995). `reservations`: for how many jobs a start is reserved;
    with a large number no job is delayed by one behind it (conservative, Mu'alem and Feitelson 2001). `by_tenant`:
    the order is by what tenants have, and in the order of arrival within each."""

    last: _Last | None = None

    def policy(snapshot: Snapshot) -> list[Decision]:
        nonlocal last
        if backfill and snapshot.releases is not None:
            snapshot.releases.begin()
        newcomers = None if last is None else last.newcomers(snapshot)
        if last is not None and newcomers == [] and last.stays(snapshot):
            return []
        trial = _Trial(snapshot, place, backfill, reservations, reason)
        if last is not None and newcomers is not None:
            trial.decide_on(newcomers, last.reserved)
        else:
            trial.decide(order(snapshot))
        last = _Last.of(trial, _KEYS.get(order), by_tenant)
        return trial.decided

    return policy


@dataclass(slots=True)
class _Last:
    """What a policy remembers of its last decision. As long as nothing becomes free, only jobs that joined the
    queue since need a look, because time alone helps nobody to start: it saves work and changes no decision."""

    queue: JobQueue
    key: SortKey | None  # None: by tenant
    arrivals: int
    gains: int
    reserved: list[JobRequest]
    started: list[str]

    @classmethod
    def of(cls, trial: "_Trial", key: SortKey | None, by_tenant: bool) -> "_Last | None":
        queue = trial.snapshot.waiting
        if not isinstance(queue, JobQueue) or not trial.reserved or trial.book.quotas:
            return None
        if key is None and not by_tenant:
            return None
        if trial.reservations > 1:
            return None  # jobs in between may have a reservation next time
        started = [one.job_id for one in trial.decided if isinstance(one, JobPlacement)]
        reserved = [one.job for one in trial.reserved]
        if key is None and started:
            return None  # tenants have more than they had
        return cls(queue, key, len(queue.arrivals), trial.free.gains, reserved, started)

    def newcomers(self, snapshot: Snapshot) -> list[JobRequest] | None:
        """None: everybody needs a look."""
        queue, key = self.queue, self.key
        if snapshot.waiting is not queue or snapshot.free.gains != self.gains or snapshot.quotas:
            return None
        if any(map(queue.find, self.started)):
            return None  # the starts were not carried out
        if any(queue.find(job.job_id) is not job for job in self.reserved):
            return None
        found = [queue.find(name) for name in queue.arrivals[self.arrivals :]]
        jobs = [job for job in found if job is not None]
        if key is None:
            far = all(_is_far(job, queue) for job in jobs)
            return [] if far else None
        if any(key(job) <= key(self.reserved[-1]) for job in jobs):
            return None
        view = queue.ordered(key)
        if len(view) <= _MOST_TRIED:
            return jobs
        jobs = [job for job in jobs if key(job) < key(view[_MOST_TRIED])]
        into_view = view[_MOST_TRIED - len(self.started) : _MOST_TRIED]
        return jobs + [job for job in into_view if job not in jobs]

    def stays(self, snapshot: Snapshot) -> bool:
        """Nobody needs a look: whether the reservations are known to hold."""
        releases = snapshot.releases
        if releases is None or not all(map(only_gpus, self.reserved)):
            return False
        if any(releases.earliest(job) is None for job in self.reserved):
            return False
        releases.forget()
        self.arrivals, self.started = len(self.queue.arrivals), []
        return True


def _is_far(job: JobRequest, queue: JobQueue) -> bool:
    """Whether so many jobs of its tenant are before it that it is not tried."""
    own = queue.by_tenant[job.tenant].jobs
    return len(own) > _MOST_TRIED and own[_MOST_TRIED].arrival_s < job.arrival_s


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
        waiting = self.snapshot.waiting
        self.shapes = waiting if isinstance(waiting, JobQueue) else ShapeNumbers()
        # What is free only shrinks: these shapes never fit in this decision, and why.
        self.failed: dict[int, str] = {}
        self.narrow: tuple[_Reservation, FreeCapacity] | None = None
        self.harmful: dict[int, float] = {}  # they delay a reserved job if they end after this moment

    def decide(self, ordered: Iterable[JobRequest]) -> None:
        try:
            rest = iter(ordered)
            if self._in_turn(rest):
                self._behind(rest)
        finally:
            self._take_back()

    def decide_on(self, newcomers: list[JobRequest], reserved: list[JobRequest]) -> None:
        """Looks at these jobs only, behind those that have a reservation."""
        try:
            for job in reserved:
                self.failed[self.shapes.shape(job)] = ""
                found = self.reserve(job)
                if found is not None:
                    self.reserved.append(found)
            if newcomers:
                self._behind(iter(newcomers))
        finally:
            self._take_back()

    def _in_turn(self, jobs: Iterator[JobRequest]) -> bool:
        """Starts jobs until one does not fit; whether those behind it may be tried."""
        for job in jobs:
            refused = self.book.refuses(job)
            if refused is not None:
                self.decided.append(Waits(job.job_id, refused))
                continue
            places = self.place(job, self.free)
            if places is None:
                return self.wait(job, self.shapes.shape(job))
            self.start(job, places)
        return False

    def _behind(self, jobs: Iterator[JobRequest]) -> None:
        """Jobs behind one that waits. Most of them do not fit either: a glance at their shape tells."""
        waiting, failed, harmful = self.snapshot.waiting, self.failed, self.harmful
        shapes = waiting.shapes if isinstance(waiting, JobQueue) else {}
        unknown = self.shapes.shape
        now_s, hopeless = self.snapshot.now_s, self.full() or self.nobody_fits()
        told = _MOST_REASONS if len(waiting) < _LONG_QUEUE else 0
        number = 0
        for job in itertools.islice(jobs, _MOST_TRIED):
            number += 1
            if hopeless and number > told:
                break
            name = job.job_id
            shape = shapes[name] if name in shapes else unknown(job)
            if shape in failed or hopeless:
                if number <= told:
                    self.decided.append(Waits(name, self.why(job, shape)))
                continue
            if shape in harmful and (job.predicted_s is None or now_s + job.predicted_s > harmful[shape]):
                continue
            refused = self.book.refuses(job)
            if refused is not None:
                self.decided.append(Waits(name, refused))
                continue
            places = self.place(job, self.free)
            if places is None:
                if not self.wait(job, shape):
                    break
                hopeless = self.nobody_fits()
                continue
            places = self.without_harm(job, shape, places)
            if places is not None:
                self.start(job, places)
                hopeless = self.full()
            hopeless = hopeless or self.nobody_fits()

    def why(self, job: JobRequest, shape: int) -> str:
        """Why a job of this shape waits, worded once."""
        if shape in self.harmful:
            return f"it fits, but would delay {self.reserved[0].job.job_id}, which is before it"
        reason = self.failed.get(shape) or why_not(job, self.free)
        self.failed[shape] = reason
        return reason

    def nobody_fits(self) -> bool:
        """Whether it is clear from the shapes alone that no waiting job can start now."""
        waiting, failed, harmful, now_s = (
            self.snapshot.waiting,
            self.failed,
            self.harmful,
            self.snapshot.now_s,
        )
        if not isinstance(waiting, JobQueue) or len(waiting.by_shape) > _MOST_SHAPES:
            return False
        if len(self.reserved) < self.reservations:
            return False  # the next that does not fit gets a reservation
        for shape, lengths in waiting.by_shape.items():
            if shape in failed:
                continue
            if shape in harmful:
                if now_s + lengths[0][0] > harmful[shape]:
                    continue
                return False
            job = waiting.find(lengths[0][1])
            if job is None or slots(job, self.free) >= job.tasks:
                return False
            failed[shape] = ""
        return True

    def full(self) -> bool:
        """Whether no job could start, whatever it asks for."""
        if self.free.free_gpus:
            return False
        waiting = self.snapshot.waiting
        if isinstance(waiting, JobQueue):
            return not waiting.sharing
        return all(job.gpus_per_task and not job.fractional for job in waiting)

    def _take_back(self) -> None:
        gains = self.free.gains
        for one in self.started:
            self.free.give(one.request, one.places)
            if self.releases is not None:
                self.releases.give(one.request, one.places, one.expected_end_s)
        if self.releases is not None:
            self.releases.forget()
        self.free.gains = gains  # nothing is free that was not before

    def start(self, job: JobRequest, places: tuple[TaskPlace, ...]) -> None:
        now_s = self.snapshot.now_s
        ends_s = None if job.predicted_s is None else now_s + job.predicted_s
        if len(self.snapshot.waiting) > 1:  # else nobody looks again
            self.free.take(job, places)
            if self.releases is not None:
                self.releases.take(job, places, ends_s)
            self.started.append(RunningJob(job, places, now_s, ends_s))
            self.harmful.clear()
            self.narrow = None
        self.book.count(job, job.gpus)
        why = self.reason if not self.reserved else f"it ends before {self.reserved[0].job.job_id} can start"
        told = getattr(self.place, "why", {}).get(job.job_id)  # a placer that chose between ways says why
        why = f"{why}; {told}" if told else why
        self.decided.append(JobPlacement(job.job_id, places, why))

    def wait(self, job: JobRequest, shape: int) -> bool:
        """Whether jobs behind this one may be tried."""
        reason = self.failed[shape] = why_not(job, self.free)
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
            self.releases = Releases(self.free, self.snapshot.running).begin()
            for one in self.started:
                self.releases.take(one.request, one.places, one.expected_end_s)
        now_s = self.snapshot.now_s
        if only_gpus(job):
            start = self.releases.earliest(job)
            return None if start is None else _Reservation(job, max(start.at_s, now_s), start)
        found = _play_ends(job, self.snapshot, self.free, self.started, self.releases.by_end, self.place)
        return None if found is None else _Reservation(job, max(found[0], now_s), None, found[1])

    def without_harm(
        self, job: JobRequest, shape: int, places: tuple[TaskPlace, ...]
    ) -> tuple[TaskPlace, ...] | None:
        """Places with which no reserved job starts later: these, if the job ends before or leaves enough, or others
        on nodes that the reserved job has no use for."""
        ends_s = float("inf") if job.predicted_s is None else self.snapshot.now_s + job.predicted_s
        late = [one for one in self.reserved if ends_s > one.start_s]
        harmed = next((one for one in late if not self._has_room(job, places, one)), None)
        if harmed is not None and harmed.start is not None and self.releases is not None:
            places = self.place(job, self._of_no_use(harmed)) or ()
            harmed = next((one for one in late if not places or not self._has_room(job, places, one)), None)
        if harmed is not None:
            self.harmful[shape] = harmed.start_s
            reason = f"it fits, but would delay {harmed.job.job_id}, which is before it"
            self.decided.append(Waits(job.job_id, reason))
            return None
        for one in late:
            if one.free_then is not None:
                one.free_then.take(job, places)
        return places

    def _of_no_use(self, reserved: _Reservation) -> FreeCapacity:
        """The nodes that a reserved job has no use for."""
        if self.narrow is None or self.narrow[0] is not reserved:
            assert self.releases is not None and reserved.start is not None
            able = self.releases.of_no_use(reserved.job, reserved.start.at_s)
            self.narrow = reserved, self.free.narrowed(able)
        return self.narrow[1]

    def _has_room(self, job: JobRequest, places: tuple[TaskPlace, ...], reserved: _Reservation) -> bool:
        if reserved.start is None:
            assert reserved.free_then is not None
            return has_room(job, places, reserved.free_then)
        assert self.releases is not None
        start = reserved.start
        return self.releases.lost(places, reserved.job, start.at_s) <= self.releases.spare(start)


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
