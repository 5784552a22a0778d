"""LoadForecast: the load of a role in a while, and how far such forecasts were off. Owned by ForecastRule.

Load is work that arrives, in replicas: seconds of a replica's time per second. The forecast is the mean of the last
looks plus a damped trend; its margin is a quantile of its own past errors, so a bursty trace gets the margin it has
shown to need, and a calm one gets none.
"""

import math
from collections import deque
from dataclasses import dataclass, field

_DAMPED = 0.5  # of a trend is believed
_FEW_ERRORS = 8  # with fewer, the margin is that of a Poisson process


@dataclass(slots=True)
class LoadForecast:
    horizon_s: float  # how far ahead: what a new replica takes to start
    interval_s: float  # between two looks
    window_s: float = 60.0  # over which load is averaged
    trend_s: float = 300.0  # over which its trend is
    memory_s: float = 2400.0  # how long errors count
    _looks: deque[tuple[float, float]] = field(default_factory=deque)  # time, work since the look before
    _made: deque[tuple[float, float]] = field(default_factory=deque)  # for when, how much
    _errors: deque[tuple[float, float]] = field(default_factory=deque)
    _first_s: float | None = None

    def note(self, now_s: float, work_s: float) -> None:
        """Work that came since the look before."""
        if self._first_s is None:
            self._first_s = now_s - self.interval_s
        self._looks.append((now_s, work_s))
        kept_s = max(self.trend_s, self.window_s)
        while self._looks[0][0] <= now_s - kept_s:
            self._looks.popleft()
        actual = self.level(now_s)
        while self._made and self._made[0][0] <= now_s:
            due_s, predicted = self._made.popleft()
            self._errors.append((due_s, actual - predicted))
        while self._errors and self._errors[0][0] < now_s - self.memory_s:
            self._errors.popleft()
        self._made.append((now_s + self.horizon_s, self.predicted(now_s)))

    def level(self, now_s: float) -> float:
        """Mean load of the last window, or since the beginning."""
        return self._mean(now_s - self.window_s, now_s)

    def predicted(self, now_s: float) -> float:
        """Without a margin."""
        assert self._first_s is not None
        half_s = min(self.trend_s, now_s - self._first_s) / 2
        if half_s < self.window_s:
            return self.level(now_s)
        slope = (self._mean(now_s - half_s, now_s) - self._mean(now_s - 2 * half_s, now_s - half_s)) / half_s
        return max(0.0, self.level(now_s) + _DAMPED * slope * self.horizon_s)

    def margin(self, quantile: float, work_of_one_s: float) -> float:
        """What such a share of the past forecasts was too low by, at most. `work_of_one_s`: of a mean request."""
        if len(self._errors) < _FEW_ERRORS:
            now_s = self._looks[-1][0]
            return math.sqrt(self.level(now_s) * work_of_one_s / self.window_s)
        errors = sorted(error for _, error in self._errors)
        return max(0.0, errors[min(len(errors) - 1, int(quantile * len(errors)))])

    def _mean(self, from_s: float, to_s: float) -> float:
        assert self._first_s is not None
        work = sum(work for time_s, work in self._looks if from_s < time_s <= to_s)
        return work / max(self.interval_s, to_s - max(from_s, self._first_s))
