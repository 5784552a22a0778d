"""Finding the highest rate that holds an objective: doubling, then bisection, then confirmation. Pure.

The campaign asks `next_rate`, runs a trial there, and tells the result. The rule:

1. From the starting rate, double while it holds (halve while it fails) until the limit is enclosed.
2. Halve the enclosed ratio (geometric mean) until it is within the tolerance.
3. Nothing is believed on one trial's word: a failure is tried again at once (a hiccup of the machine must
   not bound the search), and the best rate must hold twice. Where two trials disagree, a third decides.

A trial holds only where the share of good requests is shown with 95% confidence (`slo.verdict`), so the
answer errs on the side of too low.
"""

import math
from dataclasses import dataclass, field


@dataclass
class RateSearch:
    """The state between trials. `found` is None until a rate has held twice and the next one failed twice."""

    start: float
    tolerance: float = 0.1  # how far apart, as a ratio, the holding and the failing rate may stay
    most: float = 1e6
    least: float = 1e-3
    most_trials: int = 40
    trials: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def failing(self) -> float:
        """The lowest rate that has failed twice."""
        return min((rate for rate in self._rates if self._count(rate, False) >= 2), default=math.inf)

    @property
    def holding(self) -> float | None:
        """The highest rate that has held and not been contradicted, below every failing rate."""
        return max((rate for rate in self._rates if self._holds(rate) and rate < self.failing), default=None)

    @property
    def found(self) -> float | None:
        best = self.holding
        return best if best is not None and best == self.confirmed and self._is_enclosed(best) else None

    @property
    def confirmed(self) -> float | None:
        """The highest rate that has held twice, even where the trials ran out before the limit was enclosed."""
        twice = (rate for rate in self._rates if self._count(rate, True) >= 2 and rate < self.failing)
        return max(twice, default=None)

    def next_rate(self) -> float | None:
        """Where to try next; None when there is nothing left to learn."""
        if self.found is not None or len(self.trials) >= self.most_trials:
            return None
        for rate in self._rates:
            if self._count(rate, False) == 1 and self._count(rate, True) < 2:
                return rate
        best, limit = self.holding, self.failing
        if best is None:
            lower = self.start if limit == math.inf else limit / 2
            return lower if lower >= self.least else None
        if self._is_enclosed(best):
            return best
        return min(best * 2, self.most) if limit == math.inf else math.sqrt(best * limit)

    def tell(self, rate: float, held: bool) -> None:
        self.trials.append((rate, held))

    @property
    def _rates(self) -> set[float]:
        return {rate for rate, _ in self.trials}

    def _count(self, rate: float, held: bool) -> int:
        return self.trials.count((rate, held))

    def _holds(self, rate: float) -> bool:
        held, failed = self._count(rate, True), self._count(rate, False)
        return failed < 2 and (held >= 2 or (held == 1 and failed == 0))

    def _is_enclosed(self, best: float) -> bool:
        return best >= self.most or self.failing / best <= 1 + self.tolerance
