"""The order in which waiting jobs are tried, and what happens behind one that does not fit. Most policies are an
order, a placer, and this loop.

    queue_policy(by_arrival, pack_gang, backfill=True)    # EASY backfill
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fit import Placer, only_gpus, pack_gang, slots, tell_started
from cumulo.cluster.decide.fit_tables import fit_table
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.policy.looks import (
    GLANCE,
    LONG_QUEUE,
    MOST_TRIED,
    PLACING,
    PRICING,
    RESERVING,
    STARTING,
    Looks,
    has_many_shapes,
    is_costly,
    is_long,
    is_over,
)
from cumulo.cluster.decide.policy.orders import KEYS, Order, by_arrival, rows_besides
from cumulo.cluster.decide.policy.quota_lines import KeyLines, QuotaLines, TenantLines, quota_lines
from cumulo.cluster.decide.policy.reservations import Places, Reservation, Reservations
from cumulo.cluster.decide.queue import JobQueue, SortKey, WaitingRow, by_arrival_key
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.shapes import GangShape, too_few
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_MOST_REASONS = 20  # jobs behind it that are told why they wait, in one decision
_ANY = float("inf")


def queue_policy(
    order: Order = by_arrival,
    place: Placer = pack_gang,
    backfill: bool = False,
    reservations: int = 1,
    reason: str = "its turn, and its whole gang fits",
    by_tenant: Callable[[Snapshot, JobQueue], TenantLines] | None = None,
) -> Policy:
    """Jobs are placed in `order` until one does not fit. With `backfill` later ones may start too, if they end
    before the start reserved for it (EASY, Lifka 1995). `reservations`: for how many jobs a start is reserved;
    with a large number no job is delayed by one behind it (conservative, Mu'alem and Feitelson 2001). `by_tenant`:
    the order is by what tenants have, and in the order of arrival within each; these are their lines."""

    last: _Last | None = None
    looks = Looks(always_costly=reservations > 1 or hasattr(place, "started"))
    quotas: QuotaLines | None = None
    key = KEYS.get(order)
    lines = by_tenant or (lambda _, queue: KeyLines(queue, key or by_arrival_key))

    def policy(snapshot: Snapshot) -> list[Decision]:
        nonlocal last, quotas
        if backfill and snapshot.releases is not None:
            snapshot.releases.begin()
        newcomers = None if last is None else last.newcomers(snapshot)
        if last is not None and newcomers == [] and last.stays(snapshot):
            return []
        trial = _Trial(snapshot, place, backfill, reservations, reason)
        # Only while something runs: its end is the next occasion.
        if looks.too_soon(snapshot.now_s) and snapshot.running and is_long(snapshot.waiting):
            last, trial.behind = None, False
            looks.passed_over += 1
        else:
            trial.most = looks.begin(snapshot.now_s)
        if last is not None and newcomers is not None:
            trial.decide_on(newcomers, last.reserved, last.queue)
        elif (
            snapshot.quotas and is_long(snapshot.waiting) and (found := quota_lines(quotas, snapshot, lines))
        ):
            quotas = found
            trial.decide_in(quotas)
        else:
            trial.decide(order(snapshot))
        last = None
        if trial.behind:
            last = _Last.after(trial, key, by_tenant is not None)
            looks.end(trial.most, trial.work, trial.costly())
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
    # That fitted, but would have delayed somebody: where more than one start is reserved, one that no longer fits
    # may get a reservation, too.
    passed: list[JobRequest]

    @classmethod
    def after(cls, trial: "_Trial", key: SortKey | None, by_tenant: bool) -> "_Last | None":
        queue = trial.snapshot.waiting
        if not isinstance(queue, JobQueue) or not trial.reserved.made or trial.book.quotas:
            return None
        if key is None and not by_tenant:
            return None
        started = [one.job_id for one in trial.decided if isinstance(one, JobPlacement)]
        reserved = [one.job for one in trial.reserved.made]
        if key is None and started:
            return None  # tenants have more than they had
        passed = list(trial.passed.values()) if trial.reservations > 1 and started else []
        return cls(queue, key, len(queue.arrivals), trial.free.gains, reserved, started, passed)

    def newcomers(self, snapshot: Snapshot) -> list[JobRequest] | None:
        """None: everybody needs a look."""
        queue, key = self.queue, self.key
        if snapshot.waiting is not queue or snapshot.free.gains != self.gains or snapshot.quotas:
            return None
        if any(map(queue.find, self.started)):
            return None  # the starts were not carried out
        if any(slots(job, snapshot.free) < job.tasks for job in self.passed):
            return None
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
        if len(view) <= MOST_TRIED:
            return jobs
        jobs = [job for job in jobs if key(job) < key(view[MOST_TRIED])]
        into_view = view[MOST_TRIED - len(self.started) : MOST_TRIED]
        return jobs + [job for job in into_view if job not in jobs]

    def stays(self, snapshot: Snapshot) -> bool:
        """Nobody needs a look: whether the reservations are known to hold."""
        releases = snapshot.releases
        if releases is None:
            return False
        if any(releases.earliest(job) is None for job in self.reserved if only_gpus(job)):
            return False
        releases.forget()
        self.arrivals, self.started = len(self.queue.arrivals), []
        return True


def _is_far(job: JobRequest, queue: JobQueue) -> bool:
    """Whether so many jobs of its tenant are before it that it is not tried."""
    own = queue.by_tenant[job.tenant].jobs
    return len(own) > MOST_TRIED and own[MOST_TRIED].arrival_s < job.arrival_s


@dataclass
class _Trial:
    """One decision while it is made."""

    snapshot: Snapshot
    place: Placer
    backfill: bool
    reservations: int
    reason: str
    decided: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.snapshot.free
        self.book = QuotaBook(self.snapshot)
        self.reserved = Reservations(self.snapshot, self.place)
        # What is free only shrinks: these shapes never fit in this decision, and why.
        self.failed: dict[GangShape, str] = {}
        self.harmful: dict[GangShape, float] = {}  # they delay a reserved job if they end after this moment
        self.certain: dict[GangShape, float] = {}  # the same, whoever else starts
        self.passed: dict[GangShape, JobRequest] = {}  # one of each of these shapes
        self.behind, self.most = True, MOST_TRIED  # jobs behind one that waits are looked at, and so many
        self.work = 0  # that was done behind one that waits
        self._placing = PRICING if hasattr(self.place, "started") else PLACING
        self.hopeless = False  # nobody else can start
        self.refused: dict[str, float] = {}  # of tenants at their limits: the fewest GPUs that were refused
        self._many_shapes = has_many_shapes(self.snapshot.waiting)
        self._fitting: GangShape | None = None  # a shape that fits, and delays nobody as far as is known

    def decide(self, ordered: Iterator[WaitingRow]) -> None:
        try:
            if self._in_turn(ordered):
                self._behind(ordered)
        finally:
            self.reserved.take_back(forget=self.behind)

    def decide_in(self, lines: QuotaLines) -> None:
        """As `decide`, where tenants have quotas and many jobs wait."""
        lines.update(self.book)
        try:
            for told, candidate in lines.in_turn(self.book):
                self.decided += told
                if candidate is None:
                    break
                place, _, (job, shape, *_), _ = candidate
                places = self.place(job, self.free)
                if places is not None:
                    self.start(job, places)
                    continue
                if self.wait(job, shape):
                    self._behind(lines.lines.rows_behind(place))
                break
        finally:
            self.reserved.take_back(forget=self.behind)

    def decide_on(self, newcomers: list[JobRequest], reserved: list[JobRequest], queue: JobQueue) -> None:
        """Looks at these jobs only, behind those that have a reservation."""
        try:
            for job in reserved:
                self.failed[queue.shapes[job.job_id]] = ""
                self.reserved.reserve(job)
            if newcomers:
                self._behind(map(queue.row, newcomers))
        finally:
            self.reserved.take_back()

    def _in_turn(self, rows: Iterator[WaitingRow]) -> bool:
        """Starts jobs until one does not fit; whether those behind it may be tried."""
        for job, shape, _, gpus, _ in rows:
            if gpus >= self.refused.get(job.tenant, _ANY):
                continue  # as one of its tenant that asks for no more: of a long queue only the first is told
            refused = self.book.refuses(job, gpus)
            if refused is not None:
                self._tell_refused(job, gpus, refused)
                continue
            places = self.place(job, self.free)
            if places is None:
                return self.wait(job, shape)
            self.start(job, places)
        return False

    def _behind(self, rows: Iterator[WaitingRow]) -> None:
        """Jobs behind one that waits. Most of them do not fit either: a glance at their shape tells."""
        failed, now_s = self.failed, self.snapshot.now_s
        self.hopeless = self.full() or self.nobody_fits()
        told = _MOST_REASONS if len(self.snapshot.waiting) < LONG_QUEUE else 0
        for job, shape, seconds, gpus, _ in itertools.islice(rows, told):
            if shape in failed or self.hopeless:
                self.decided.append(Waits(job.job_id, self.why(job, shape)))
            elif now_s + seconds > self.harmful.get(shape, _ANY):
                continue
            elif not self._tried(job, shape, gpus):
                return
        if self.hopeless:
            return
        # Most are of a shape that failed already; those of one that fails on the way are passed over below.
        refused = self.refused
        for job, shape, seconds, gpus, _ in rows_besides(rows, self.most - told, self):
            if shape in failed or now_s + seconds > self.harmful.get(shape, _ANY):
                continue
            if gpus >= refused.get(job.tenant, _ANY):
                continue
            if not self._tried(job, shape, gpus) or self.hopeless or is_over(self.most, self.work):
                return

    def _tried(self, job: JobRequest, shape: GangShape, gpus: float) -> bool:
        """Starts a job if it fits and delays nobody; whether those behind it may be tried."""
        self.work += GLANCE
        refused = self.book.refuses(job, gpus) if self.book.quotas else None
        if refused is not None:
            self._tell_refused(job, gpus, refused)
            return True
        # Placers find places where there are enough, so that counting tells which jobs do not fit.
        able = self.able(job, shape)
        harmless: Places | Reservation | None = None
        if able >= shape.tasks:
            harmless = self.reserved.certain_harm(job)
            if harmless is not None:
                self.certain[shape] = harmless.start_s
            else:
                harmless = self.reserved.harm_anywhere(job)
                self.work += self._placing + self.reserved.checking
            if harmless is None and (places := self.place(job, self.free)) is not None:
                harmless = self.reserved.without_harm(job, places)
        if harmless is None:
            if not self.wait(job, shape, able):
                return False
            self.hopeless = self.nobody_fits()
            return True
        if isinstance(harmless, Reservation):
            self.harmful[shape], self.passed[shape] = harmless.start_s, job
            reason = f"it fits, but would delay {harmless.job.job_id}, which is before it"
            self.decided.append(Waits(job.job_id, reason))
        else:
            self.start(job, harmless)
            self.work += STARTING
            self.hopeless = self.full()
        self.hopeless = self.hopeless or self.nobody_fits()
        return True

    def _tell_refused(self, job: JobRequest, gpus: float, why: str) -> None:
        self.decided.append(Waits(job.job_id, why))
        if len(self.snapshot.waiting) >= LONG_QUEUE:
            self.refused[job.tenant] = gpus

    def able(self, job: JobRequest, shape: GangShape) -> int:
        """How many of its tasks fit now."""
        if shape.only_gpus:
            return self.free.task_slots(shape.gpus_per_task, shape.devices)
        return fit_table(job, self.free, shape.fit_key).total

    def why(self, job: JobRequest, shape: GangShape) -> str:
        """Why a job of this shape waits, worded once."""
        if shape in self.harmful:
            return f"it fits, but would delay {self.reserved.made[0].job.job_id}, which is before it"
        reason = self.failed.get(shape) or too_few(shape.needs, self.able(job, shape))
        self.failed[shape] = reason
        return reason

    def nobody_fits(self) -> bool:
        """Whether it is clear from the shapes alone that no waiting job can start now."""
        waiting, failed, harmful = self.snapshot.waiting, self.failed, self.harmful
        if self._many_shapes or not isinstance(waiting, JobQueue):
            return False
        if len(self.reserved.made) < self.reservations:
            return False  # the next that does not fit gets a reservation
        if self._fitting is not None and self._fitting not in failed and self._fitting not in harmful:
            return False
        for shape, lengths in waiting.by_shape.items():
            if shape in failed:
                continue
            if shape in harmful:
                if self.snapshot.now_s + lengths[0][0] > harmful[shape]:
                    continue
                return False
            job = waiting.find(lengths[0][1])
            if job is None or self.able(job, shape) >= shape.tasks:
                self._fitting = shape
                return False
            failed[shape] = ""
        return True

    def costly(self) -> bool:
        """Long queues are, many shapes, reservations of jobs with cores; and quotas, where every job is looked at
        again."""
        if self.book.quotas or is_costly(self.snapshot.waiting):
            return True
        return any(one.start is None for one in self.reserved.made)

    def full(self) -> bool:
        """Whether no job could start, whatever it asks for."""
        if self.free.free_gpus:
            return False
        waiting = self.snapshot.waiting
        if isinstance(waiting, JobQueue):
            return not waiting.sharing
        return all(job.gpus_per_task and not job.fractional for job in waiting)

    def start(self, job: JobRequest, places: tuple[TaskPlace, ...]) -> None:
        if len(self.snapshot.waiting) > 1:  # else nobody looks again
            self.reserved.start(job, places)
            self.harmful = self.certain.copy()
            self._fitting = None
            tell_started(self.place, job, places)
        self.book.count(job, job.gpus)
        made = self.reserved.made
        why = self.reason if not made else f"it ends before {made[0].job.job_id} can start"
        told = getattr(self.place, "why", {}).get(job.job_id)  # a placer that chose between ways says why
        why = f"{why}; {told}" if told else why
        self.decided.append(JobPlacement(job.job_id, places, why))

    def wait(self, job: JobRequest, shape: GangShape, able: int | None = None) -> bool:
        """Whether jobs behind this one may be tried. `able`: tasks that fit, if they were counted."""
        able = self.able(job, shape) if able is None else able
        reason = self.failed[shape] = too_few(shape.needs, able)
        if not self.backfill or not self.behind:
            self.decided.append(Waits(job.job_id, reason))
            return False
        if len(self.reserved.made) >= self.reservations:
            self.decided.append(Waits(job.job_id, reason))
            return True
        found = self.reserved.reserve(job)
        self.work += RESERVING
        if found is None:
            self.decided.append(Waits(job.job_id, reason))
            return False  # nobody knows when it could start, so nobody overtakes it
        ahead_s = found.start_s - self.snapshot.now_s
        when = f"it starts in {ahead_s:.0f} s at the latest, if predictions hold"
        if ahead_s < 1:
            when = "jobs before it run longer than predicted"
        self.decided.append(Waits(job.job_id, f"{reason}; {when}", found.start_s))
        return True
