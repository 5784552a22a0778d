"""LoadForecast: a role's load in a while: the mean of the last looks plus a damped trend. Owned by ForecastRule.

Load is work that arrives, in replicas: seconds of a replica's time per second.
"""

from collections import deque
from dataclasses import dataclass, field

_DAMPED = 0.5  # of a trend is believed


@dataclass(slots=True)
class LoadForecast:
    horizon_s: float  # how far ahead: what a new replica takes to start
    interval_s: float  # between two looks
    window_s: float = 60.0  # over which load is averaged
    trend_s: float = 300.0  # over which its trend is
    _looks: deque[tuple[float, float]] = field(default_factory=deque)  # time, work since the look before
    _first_s: float | None = None

    def note(self, now_s: float, work_s: float) -> None:
        """Work that came since the look before."""
        if self._first_s is None:
            self._first_s = now_s - self.interval_s
        self._looks.append((now_s, work_s))
        kept_s = max(self.trend_s, self.window_s)
        while self._looks[0][0] <= now_s - kept_s:
            self._looks.popleft()

    def predicted(self, now_s: float) -> float:
        assert self._first_s is not None
        level = self._mean(now_s - self.window_s, now_s)
        half_s = min(self.trend_s, now_s - self._first_s) / 2
        if half_s < self.window_s:
            return level
        slope = (self._mean(now_s - half_s, now_s) - self._mean(now_s - 2 * half_s, now_s - half_s)) / half_s
        return max(0.0, level + _DAMPED * slope * self.horizon_s)

    def lately(self, now_s: float, window_s: float) -> float:
        """Mean load of a short window, as it is in a burst."""
        return self._mean(now_s - window_s, now_s)

    def _mean(self, from_s: float, to_s: float) -> float:
        assert self._first_s is not None
        work = sum(work for time_s, work in self._looks if from_s < time_s <= to_s)
        return work / max(self.interval_s, to_s - max(from_s, self._first_s))
