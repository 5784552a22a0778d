"""Starts that are reserved for jobs that do not fit now, and whether another job would delay one of them. The loop
over the waiting jobs asks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from cumulo.cluster.decide.fit import Placer, able_nodes, first_gpus, only_gpus, pack_gang, tightest
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.policy.ends_ahead import EndsAhead, EndsUntil, Moment
from cumulo.cluster.decide.releases import Releases, Start
from cumulo.cluster.decide.running import table_of
from cumulo.cluster.decide.snapshot import Snapshot

_FEW_NODES = 100  # that are looked at one by one

Places = tuple[TaskPlace, ...]


@dataclass(slots=True)
class Reservation:
    job: JobRequest
    start_s: float
    start: Start | None  # of a gang of whole GPUs; others have the whole cluster at that moment instead
    ends: EndsUntil | None = None  # of the jobs that have ended then
    after: int = 0  # so many jobs were started before it was made
    then: Moment | None = None


@cache
def _without(devices: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in devices if name not in others)


class Reservations:
    """Those of one decision, next to the jobs that it starts. What it tries is taken back at its end."""

    def __init__(self, snapshot: Snapshot, place: Placer) -> None:
        self.snapshot, self.place = snapshot, place
        self.free, self.releases = snapshot.free, snapshot.releases
        self.made: list[Reservation] = []
        # Of whole GPUs: their moments, GPUs of a task, and slots; of jobs that accept all devices, and of others.
        self._anywhere: list[tuple[float, int, Start, Reservation]] = []
        self._somewhere: list[tuple[float, int, Start, Reservation]] = []
        self.started: list[RunningJob] = []
        self._narrow: tuple[Reservation, FreeCapacity] | None = None
        self._priced = hasattr(
            place, "started"
        )  # others place a gang sooner than it is proved that it does harm

    @property
    def checking(self) -> int:
        """How much work it is to find out whether a job does harm, as `looks` counts it."""
        of_gpus = len(self._anywhere) + len(self._somewhere)
        return (of_gpus + 4 * (len(self.made) - of_gpus)) // 8  # others are asked node by node

    def start(self, job: JobRequest, places: Places) -> None:
        """Counts a job as running."""
        now_s = self.snapshot.now_s
        if self._priced:  # it places another way when it is told of this job
            for reserved in self.made:
                if reserved.start is None:
                    self._then(reserved)
        ends_s = None if job.predicted_s is None else now_s + job.predicted_s
        self.free.allocate(job, places)
        if self.releases is not None:
            self.releases.add(job, places, ends_s)
        self.started.append(RunningJob(job, places, now_s, ends_s))
        self._narrow = None

    def take_back(self, forget: bool = True) -> None:
        """`forget`: what nobody asked for in this decision is not asked for in the next ones either."""
        gains = self.free.gains
        for one in self.started:
            self.free.release(one.request, one.places)
            if self.releases is not None:
                self.releases.remove(one.request, one.places, one.expected_end_s)
        if self.releases is not None and forget:
            self.releases.forget()
        self.free.gains = gains  # nothing is free that was not before

    def reserve(self, job: JobRequest) -> Reservation | None:
        """The earliest start for a gang that does not fit now, when running jobs end as predicted; None: nobody
        knows it."""
        if self.releases is None:
            self.releases = Releases(self.free, self.snapshot.running).begin()
            for one in self.started:
                self.releases.add(one.request, one.places, one.expected_end_s)
        now_s = self.snapshot.now_s
        found: Reservation | None = None
        if only_gpus(job):
            start = self.releases.earliest(job)
            if start is not None:
                found = Reservation(job, max(start.at_s, now_s), start)
        else:
            found = self._after_ends(job, self.releases.by_end)
        if found is not None:
            self.made.append(found)
            if found.start is not None:
                counted = self._somewhere if job.devices else self._anywhere
                counted.append((found.start_s, job.gpus_per_task, found.start, found))
        return found

    def without_harm(self, job: JobRequest, places: Places) -> Places | Reservation:
        """Places with which no reserved job starts later: these, if the job ends before or leaves enough, or others
        on nodes that the reserved job has no use for. Without such places, the reservation that it would harm."""
        ends_s = float("inf") if job.predicted_s is None else self.snapshot.now_s + job.predicted_s
        late = [one for one in self.made if ends_s > one.start_s]
        harmed = self._harmed(late, job, places)
        if harmed is not None and harmed.start is not None and self.releases is not None:
            elsewhere = self._elsewhere(job, harmed)
            if elsewhere:
                places, harmed = elsewhere, self._harmed(late, job, elsewhere)
        if harmed is not None:
            return harmed
        for one in late:
            if one.start is None:
                self._then(one).add(job, places)
        return places

    def _harmed(self, late: list[Reservation], job: JobRequest, places: Places) -> Reservation | None:
        for one in late:
            if one.start is None:
                if not self._then(one).has_room(job, places):
                    return one
            else:
                assert self.releases is not None
                spare = self.releases.spare(one.start)
                if self.releases.loses_more(spare, places, one.job, one.start.at_s):
                    return one
        return None

    def certain_harm(self, job: JobRequest) -> Reservation | None:
        """A reservation that a job which fits delays wherever it is placed: nodes with room for a task of it have
        room for one of the reserved job, too, now and then, so that counting tells what it costs."""
        if job.gpu_milli != WHOLE_GPU or self.releases is None or not (self._anywhere or self._somewhere):
            return None
        ends_s = float("inf") if job.predicted_s is None else self.snapshot.now_s + job.predicted_s
        each, tasks, free = job.gpus_per_task, job.tasks, self.free
        self.releases.settle()
        for start_s, gpus, start, one in self._anywhere:
            if start_s < ends_s and gpus <= each and tasks * (each // gpus) > start.by_then - start.tasks:
                return one
        for start_s, gpus, start, one in self._somewhere:
            if start_s >= ends_s or gpus > each:
                continue
            of_one, spare, devices = each // gpus, start.by_then - start.tasks, one.job.devices
            if tasks * of_one <= spare:
                continue
            if job.devices:  # tasks on nodes that the reserved job has no use for cost nothing
                others = _without(job.devices, devices)
                apart = free.task_slots(each, others) if others else 0
            else:
                apart = free.task_slots(each, ()) - free.task_slots(each, devices)
            if (tasks - apart) * of_one > spare:
                return one
        return self._nowhere(job, ends_s) if tasks == 1 and only_gpus(job) else None

    def harm_anywhere(self, job: JobRequest) -> Reservation | None:
        """The first reservation that would be harmed, if it is of a job that asks for more than whole GPUs, and a
        gang which fits would harm it wherever it is placed: this is found out sooner than a good place."""
        if job.tasks == 1 or not job.gpus_per_task or job.gpu_milli != WHOLE_GPU or not self._priced:
            return None
        ends_s = float("inf") if job.predicted_s is None else self.snapshot.now_s + job.predicted_s
        first = next((one for one in self.made if ends_s > one.start_s), None)
        if first is None or first.start is not None:
            return None
        able = able_nodes(job, self.free, _FEW_NODES)
        return first if able is not None and self._then(first).too_little_for(job, able) else None

    def _nowhere(self, job: JobRequest, ends_s: float) -> Reservation | None:
        """The reservation that a single task delays on all nodes on which it delays none of those before."""
        free, each = self.free, job.gpus_per_task
        assert self.releases is not None
        most, able = len(free.room) - 1, 0
        for room in free.room[each:]:
            able |= room
        able &= free.usable_set(job.devices)
        for start_s, gpus, start, one in itertools.chain(self._anywhere, self._somewhere):
            if start_s >= ends_s or gpus + each <= most or start.by_then > start.tasks:
                continue  # it ends before, may run beside a task of it, or leaves enough
            able &= self.releases.of_no_use(one.job, start.at_s)
            if not able:
                return one
        return None

    def _elsewhere(self, job: JobRequest, reserved: Reservation) -> Places:
        """On nodes that a reserved job has no use for; (): there is no room."""
        assert self.releases is not None and reserved.start is not None
        free, nodes = self.free, self.releases.of_no_use(reserved.job, reserved.start.at_s)
        if only_gpus(job):
            among = nodes & free.usable_set(job.devices)
            node = tightest(free, job.gpus_per_task, among)
            if node is None or (job.tasks > 1 and free.slots_among(job.gpus_per_task, among) < job.tasks):
                return ()
            if job.tasks == 1 and self.place is pack_gang:  # as it would find
                return (first_gpus(job, free, node),)
        if self._narrow is None or self._narrow[0] is not reserved:
            self._narrow = reserved, free.narrowed(nodes)
        return self.place(job, self._narrow[1]) or ()

    def _after_ends(self, job: JobRequest, ends: Sequence[tuple[float, str]]) -> Reservation | None:
        """For jobs that ask for more than whole GPUs: end by end."""
        found = self._ahead.until_it_fits(job, self.snapshot, ends, self.started)
        if found is None:
            return None
        start_s = max(ends[len(found.played) - 1][0], self.snapshot.now_s)
        return Reservation(job, start_s, None, found, len(self.started))

    def _then(self, one: Reservation) -> Moment:
        """The cluster at the moment of a reserved start. Worked out when somebody asks: often nobody does."""
        if one.then is None:
            assert one.ends is not None
            one.then = Moment(one.job, self.free, one.ends, self.started, one.after, self.place)
        return one.then

    @cached_property
    def _ahead(self) -> EndsAhead:
        return table_of(self.snapshot.running).view(EndsAhead, EndsAhead)
