"""Starts that are reserved for jobs that do not fit now, and whether another job would delay one of them."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from cumulo.cluster.decide.fit import Places, slots, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import Flags, FreeCapacity, HeldPlaces

_FIRST_STRETCH = 32  # ends of jobs


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


class Releases:
    """What running jobs free, in the order in which they are predicted to end. Most starts come soon: a few ends
    are looked at, then twice as many, and so on."""

    def __init__(self, free: FreeCapacity, running: Sequence[RunningJob]) -> None:
        ends = [(one.expected_end_s, at) for at, one in enumerate(running) if one.expected_end_s is not None]
        ends.sort()
        self.free, self.running, self.ends = free, running, ends
        self._stretches: list[HeldPlaces] = []

    def reserve(self, job: JobRequest, now_s: float) -> Reservation | None:
        """The earliest start of a gang that does not fit now, if jobs end as predicted; None: nobody knows it."""
        begin, stretch = 0, 0
        while begin < len(self.ends):
            held = self._stretch(stretch, begin)
            many = len(held.jobs)
            if slots(job, held.released(many)) >= job.tasks:
                counts = range(many + 1)
                ended = bisect.bisect_left(
                    counts, job.tasks, key=lambda some: slots(job, held.released(some))
                )
                end_s = self.ends[begin + ended - 1][0]
                same = bisect.bisect(self.ends, (end_s, len(self.running)))  # others end at the same moment
                return Reservation(job, max(end_s, now_s), held.released(same - begin).copy())
            begin, stretch = begin + many, stretch + 1
        return None

    def _stretch(self, number: int, begin: int) -> HeldPlaces:
        """The jobs that end from this one on, after all of the stretches before have ended."""
        if number == len(self._stretches):
            until = begin + (_FIRST_STRETCH << number)
            if until < len(self.ends):  # those that end at the same moment belong together
                until = bisect.bisect(self.ends, (self.ends[until - 1][0], len(self.running)))
            free = self.free
            if self._stretches:
                free = self._stretches[-1].released(len(self._stretches[-1].jobs))
            some = [self.running[at] for _, at in self.ends[begin:until]]
            self._stretches.append(HeldPlaces(free, some))
        return self._stretches[number]
