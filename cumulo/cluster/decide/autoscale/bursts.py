"""BurstMemory: how many replicas should stand ready for bursts, and how eagerly load should be followed, rehearsed
on the role's own past. Owned by ForecastRule.

A burst that is over before a new replica has started must be served by replicas that are there. The memory keeps
the work of each look, and plays it as a fluid through fleets that follow the load in different ways with different
floors: capacity that was ordered serves after the start-up, work that is not served waits, and requests that wait
longer than the SLO allows are late. The cheapest way that would have kept the SLO is the one to follow next.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_AROUND = 2  # looks before one, that count with it


class Following(NamedTuple):
    """How a fleet follows its load."""

    window_s: float  # over which load is averaged
    hold_s: float  # replicas stay so long after they were last wanted
    floor: int = 0  # replicas that stand ready whatever the load


class LookBack(NamedTuple):
    """One look of the past."""

    work_s: float  # of a saturated replica, that came since the look before
    requests: int


@dataclass(slots=True)
class BurstMemory:
    interval_s: float
    start_up_s: float
    memory_s: float = 7200.0
    looks: deque[LookBack] = field(default_factory=deque)

    def note(self, work_s: float, requests: int) -> None:
        self.looks.append(LookBack(work_s, requests))
        while len(self.looks) * self.interval_s > self.memory_s:
            self.looks.popleft()

    @property
    def span_s(self) -> float:
        return len(self.looks) * self.interval_s

    def best(
        self,
        ways: Sequence[Following],
        needed: Callable[[float], float],
        share: float,
        slack_s: float,
        most: int,
        slows: bool = True,
    ) -> Following:
        """The cheapest of these ways, each with the lowest floor that keeps `share` of the requests within
        `slack_s` of waiting; where none does, the one that keeps most. `needed`: replicas for a load. `slows`:
        whether requests that run together slow each other down, so that they may be late without a wait."""
        found = [self._with_floor(way, needed, share, slack_s, most, slows) for way in ways]
        good = [one for one in found if one[1] >= share]
        if good:
            return min(good, key=lambda one: one[2])[0]
        return max(found, key=lambda one: one[1])[0]

    def _with_floor(
        self,
        way: Following,
        needed: Callable[[float], float],
        share: float,
        slack_s: float,
        most: int,
        slows: bool,
    ) -> tuple[Following, float, float]:
        """With its lowest floor; what it keeps; replicas it takes on average."""
        follows = self._follows(way, needed, most)
        least = self._needs(needed) if slows else [0.0] * len(self.looks)
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            enough = self._kept(follows, least, middle, slack_s) >= share
            low, high = (low, middle) if enough else (middle + 1, high)
        counts = [max(low, 1, one) for one in follows]
        return (
            way._replace(floor=low),
            self._kept(follows, least, low, slack_s),
            sum(counts) / max(1, len(counts)),
        )

    def _needs(self, needed: Callable[[float], float]) -> list[float]:
        """Replicas for what came around each look: with fewer, answers come too slowly, though none waits."""
        works = [look.work_s for look in self.looks]
        return [
            needed(sum(works[max(0, at - _AROUND) : at + 1]) / (min(at, _AROUND) + 1) / self.interval_s)
            for at in range(len(works))
        ]

    def _follows(self, way: Following, needed: Callable[[float], float], most: int) -> list[int]:
        """Replicas that would have been ready at each look, without a floor."""
        window = max(1, round(way.window_s / self.interval_s))
        hold, late = round(way.hold_s / self.interval_s), math.ceil(self.start_up_s / self.interval_s)
        ordered: list[int] = []
        total = 0.0
        highest: deque[tuple[int, int]] = deque()  # of the last `hold` looks, falling
        for at, look in enumerate(self.looks):
            total += look.work_s - (self.looks[at - window].work_s if at >= window else 0.0)
            wanted = min(
                most, math.ceil(needed(max(0.0, total) / (min(at + 1, window) * self.interval_s)) - 0.05)
            )
            while highest and highest[-1][1] <= wanted:
                highest.pop()
            highest.append((at, wanted))
            while highest[0][0] < at - hold:
                highest.popleft()
            ordered.append(highest[0][1])
        # Up after the start-up, down at once: a replica serves where it was wanted all the time since its order.
        return [min(ordered[max(0, at - late) : at + 1]) for at in range(len(ordered))]

    def _kept(self, follows: Sequence[int], least: Sequence[float], floor: int, slack_s: float) -> float:
        backlog_s = late = total = 0.0
        for look, ready, enough in zip(self.looks, follows, least, strict=True):
            count = max(floor, ready, 1)
            before_s = backlog_s / count
            backlog_s = max(0.0, backlog_s + look.work_s - count * self.interval_s)
            after_s = backlog_s / count
            total += look.requests
            if enough > count:
                late += look.requests
            elif max(before_s, after_s) > slack_s:
                low, high = sorted((before_s, after_s))
                late += look.requests * (1.0 if low >= slack_s else (high - slack_s) / (high - low))
        return 1.0 - late / total if total else 1.0
