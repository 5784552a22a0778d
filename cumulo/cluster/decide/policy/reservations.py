"""Starts that are reserved for jobs that do not fit now, and whether another job would delay one of them. The loop
over the waiting jobs asks."""

from collections.abc import Sequence
from dataclasses import dataclass

from cumulo.cluster.decide.check import has_room
from cumulo.cluster.decide.fit import Placer, only_gpus, slots
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.releases import Releases, Start
from cumulo.cluster.decide.snapshot import Snapshot

Places = tuple[TaskPlace, ...]


@dataclass(slots=True)
class Reservation:
    job: JobRequest
    start_s: float
    start: Start | None  # of a gang of whole GPUs; others have the whole cluster at that moment instead
    free_then: FreeCapacity | None = None  # with the reserved job placed


class Reservations:
    """Those of one decision, next to the jobs that it starts. What it tries is taken back at its end."""

    def __init__(self, snapshot: Snapshot, place: Placer) -> None:
        self.snapshot, self.place = snapshot, place
        self.free, self.releases = snapshot.free, snapshot.releases
        self.made: list[Reservation] = []
        self.started: list[RunningJob] = []
        self._narrow: tuple[Reservation, FreeCapacity] | None = None

    def start(self, job: JobRequest, places: Places) -> None:
        """Counts a job as running."""
        now_s = self.snapshot.now_s
        ends_s = None if job.predicted_s is None else now_s + job.predicted_s
        self.free.allocate(job, places)
        if self.releases is not None:
            self.releases.add(job, places, ends_s)
        self.started.append(RunningJob(job, places, now_s, ends_s))
        self._narrow = None

    def take_back(self) -> None:
        gains = self.free.gains
        for one in self.started:
            self.free.release(one.request, one.places)
            if self.releases is not None:
                self.releases.remove(one.request, one.places, one.expected_end_s)
        if self.releases is not None:
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
            then = self._play_ends(job, self.releases.by_end)
            if then is not None:
                found = Reservation(job, max(then[0], now_s), None, then[1])
        if found is not None:
            self.made.append(found)
        return found

    def without_harm(self, job: JobRequest, places: Places) -> Places | Reservation:
        """Places with which no reserved job starts later: these, if the job ends before or leaves enough, or others
        on nodes that the reserved job has no use for. Without such places, the reservation that it would harm."""
        ends_s = float("inf") if job.predicted_s is None else self.snapshot.now_s + job.predicted_s
        late = [one for one in self.made if ends_s > one.start_s]
        harmed = self._harmed(late, job, places)
        if harmed is not None and harmed.start is not None and self.releases is not None:
            places = self.place(job, self._of_no_use(harmed)) or ()
            harmed = self._harmed(late, job, places) if places else late[0]
        if harmed is not None:
            return harmed
        for one in late:
            if one.free_then is not None:
                one.free_then.allocate(job, places)
        return places

    def _harmed(self, late: list[Reservation], job: JobRequest, places: Places) -> Reservation | None:
        for one in late:
            if one.start is None:
                assert one.free_then is not None
                if not has_room(job, places, one.free_then):
                    return one
            else:
                assert self.releases is not None
                spare = self.releases.spare(one.start)
                if self.releases.loses_more(spare, places, one.job, one.start.at_s):
                    return one
        return None

    def _of_no_use(self, reserved: Reservation) -> FreeCapacity:
        """The nodes that a reserved job has no use for."""
        if self._narrow is None or self._narrow[0] is not reserved:
            assert self.releases is not None and reserved.start is not None
            able = self.releases.of_no_use(reserved.job, reserved.start.at_s)
            self._narrow = reserved, self.free.narrowed(able)
        return self._narrow[1]

    def _play_ends(
        self, job: JobRequest, ends: Sequence[tuple[float, str]]
    ) -> tuple[float, FreeCapacity] | None:
        """The first moment at which a gang fits, and the cluster then: for jobs that ask for more than whole GPUs,
        end by end."""
        new = {one.job_id: one for one in self.started}
        then = self.free.copy()
        missing = job.tasks - slots(job, then)
        for number, (end_s, name) in enumerate(ends, 1):
            one = new.get(name) or self.snapshot.running[name]
            then.release(one.request, one.places)
            missing -= -(-one.tasks * max(1, one.request.gpus_per_task) // max(1, job.gpus_per_task))
            if missing > 0 and number < len(ends):
                continue  # cannot be enough yet
            places = self.place(job, then)
            if places is not None:
                then.allocate(job, places)
                return end_s, then
            missing = max(1, job.tasks - slots(job, then))
        return None
