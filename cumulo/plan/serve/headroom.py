"""How much more traffic a deployment would take, as a range, and how many users fit. The search asks it.

Steps that all take f times as long do at rate r what usual steps do at rate r·f, with every latency f times as
long. So one series of runs, on a grid of rates, tells the capacity of a replica for fast, expected and slow steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from cumulo.plan.serve.capacity import Capacity, RateTrial
from cumulo.plan.serve.report import ServeReport
from cumulo.spec.slo import Slo

_GRID = 1.05  # from one rate to the next


@dataclass(slots=True)
class RateGrid:
    """Runs of one replica by rate, each played once."""

    play_at: Callable[[float], ServeReport]
    share: float  # of the traffic that the replica gets
    slo: Slo
    reports: dict[int, ServeReport] = field(default_factory=dict)

    def rate(self, place: int) -> float:
        return self.share * _GRID**place

    def report(self, place: int) -> ServeReport:
        found = self.reports.get(place)
        if found is None:
            found = self.reports[place] = self.play_at(self.rate(place))
        return found

    def capacity(self, slower: float, most_rate: float) -> Capacity:
        """The highest rate that holds when steps take so many times as long as expected; at most `most_rate`."""
        shift = round(math.log(slower) / math.log(_GRID))
        slower = _GRID**shift

        def holds(place: int) -> bool:
            return self.report(place + shift).stretched(slower).holds(self.slo)

        low, high = 0, max(1, math.ceil(math.log(most_rate / self.share) / math.log(_GRID)))
        if not holds(low):
            while not holds(low := low - 2):
                if self.rate(low) < self.share / 20:
                    break
            high = min(high, low + 2)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return Capacity(self.rate(low), self._trials(slower, shift))

    def _trials(self, slower: float, shift: int) -> tuple[RateTrial, ...]:
        found = []
        for place in sorted(self.reports):
            report = self.reports[place].stretched(slower)
            found.append(RateTrial(self.rate(place - shift), report, report.holds(self.slo)))
        return tuple(found)

    def curve(self, capacity: Capacity) -> tuple[RateTrial, ...]:
        """From little traffic to more than the replica can take, as expected: by rate."""
        for part in (0.3, 0.6):
            self.report(round(math.log(part * capacity.rate / self.share) / math.log(_GRID)))
        every = self._trials(1.0, 0)
        beyond = [one for one in every if one.rate > capacity.rate]
        return (*(one for one in every if one.rate <= capacity.rate), *beyond[:3])
