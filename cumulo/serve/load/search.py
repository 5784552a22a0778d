"""Finding the highest rate that holds an objective: doubling, then bisection, then confirmation. Pure.

The campaign asks `next_rate`, runs a trial there, and tells the result. The rule:

1. From the starting rate, double while it holds (halve while it fails) until the limit is enclosed.
2. Halve the enclosed ratio (geometric mean) until it is within the tolerance.
3. The best rate must hold once more with other requests; where it does not, it counts as failed and the
   search goes on below it.

A trial holds only where the share of good requests is shown with 95% confidence (`slo.verdict`), so the
answer errs on the side of too low.
"""

import math
from dataclasses import dataclass, field


@dataclass
class RateSearch:
    """The state between trials. `found` is None until a rate has held twice."""

    start: float
    tolerance: float = 0.1  # how far apart, as a ratio, the holding and the failing rate may stay
    most: float = 1e6
    least: float = 1e-3
    most_trials: int = 24
    trials: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def failing(self) -> float:
        """The lowest rate that has failed."""
        return min((rate for rate, held in self.trials if not held), default=math.inf)

    @property
    def holding(self) -> float | None:
        """The highest rate that has held, below every rate that failed."""
        return max((rate for rate, held in self.trials if held and rate < self.failing), default=None)

    @property
    def found(self) -> float | None:
        best = self.holding
        return (
            best
            if best is not None and self.trials.count((best, True)) >= 2 and self._enclosed(best)
            else None
        )

    @property
    def confirmed(self) -> float | None:
        """The highest rate that has held twice, even where the trials ran out before the limit was enclosed."""
        twice = (
            r for r, held in self.trials if held and r < self.failing and self.trials.count((r, True)) >= 2
        )
        return max(twice, default=None)

    def next_rate(self) -> float | None:
        """Where to try next; None when there is nothing left to learn."""
        if self.found is not None or len(self.trials) >= self.most_trials:
            return None
        best, limit = self.holding, self.failing
        if best is None:
            lower = self.start if limit == math.inf else limit / 2
            return lower if lower >= self.least else None
        if self._enclosed(best):
            return best
        return min(best * 2, self.most) if limit == math.inf else math.sqrt(best * limit)

    def tell(self, rate: float, held: bool) -> None:
        self.trials.append((rate, held))

    def _enclosed(self, best: float) -> bool:
        return best >= self.most or self.failing / best <= 1 + self.tolerance
