"""How often a policy looks behind the first job that does not fit, and how far. On a large cluster something starts
or ends many times a second: where a look costs much, it is taken every few seconds, and reaches further.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.queue import JobQueue

LONG_QUEUE = 200  # of a queue that is longer, only those that were tried are told why they wait
_VERY_LONG = 2048  # jobs that wait: looks are costly, whatever their shapes
_MANY_SHAPES = 32  # if there are more, single jobs are looked at, and not all shapes before
MOST_TRIED = 200  # jobs behind the first: as Slurm's bf_max_job_test, so that a decision ends
_EVERY_S = 5.0  # where looks cost much; Slurm's bf_interval is 30 s
_MOST_TIMES = 12  # as many jobs are tried, where as many events were passed over
_MOST_SELDOM = 3  # times as seldom, and as far, where looks are much work
# What a look does, about 20 us each. The first is much work, and with the second a look ends.
_MUCH_WORK, _MOST_WORK = 400, 1200
GLANCE, PLACING, PRICING, STARTING, RESERVING = 1, 2, 4, 4, 16


@dataclass(slots=True)
class Looks:
    """Those of one policy."""

    always_costly: bool = False  # as where every way is priced, or many starts are reserved
    costly: bool = False  # as far as the last look tells
    looked_s: float = float("-inf")
    passed_over: int = 0  # events since
    seldom: int = 1

    def too_soon(self, now_s: float) -> bool:
        """Whether this event is passed over, if the queue is long."""
        costly = self.always_costly or self.costly
        return costly and 0 <= now_s - self.looked_s < self.seldom * _EVERY_S

    def begin(self, now_s: float) -> int:
        """How many jobs are tried: more of them where it was not looked at all the time."""
        times = min(1 + self.passed_over, self.seldom * _MOST_TIMES)
        self.looked_s, self.passed_over = now_s, 0
        return MOST_TRIED * times

    def end(self, tried: int, work: int, costly: bool) -> None:
        self.costly = costly
        many_events = tried >= MOST_TRIED * _MOST_TIMES
        self.seldom = min(1 + work // _MUCH_WORK, _MOST_SELDOM) if many_events else 1


def is_over(tried: int, work: int) -> bool:
    """Whether a look of so much work ends, in which so many jobs may be tried."""
    return work >= _MOST_WORK and tried > MOST_TRIED


def is_long(waiting: Sequence[JobRequest]) -> bool:
    return isinstance(waiting, JobQueue) and len(waiting) >= LONG_QUEUE


def is_costly(waiting: Sequence[JobRequest]) -> bool:
    """Whether a look is more than every event is worth."""
    return len(waiting) > _VERY_LONG or has_many_shapes(waiting)


def has_many_shapes(waiting: Sequence[JobRequest]) -> bool:
    return isinstance(waiting, JobQueue) and len(waiting.by_shape) > _MANY_SHAPES
