"""Breaker: whether a replica that fails is asked again. One per replica.

Closed: requests go there. After `most_failures` in a row it opens: none go there for a pause, which doubles each
time. Then it is half open: one request may try, and its outcome closes or opens it.
"""

from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half open"]
_LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Breaker:
    most_failures: int = 3
    pause_s: float = 1.0
    failures: int = 0  # in a row
    opened: int = 0  # times, in a row
    opened_s: float | None = None  # when it opened last; None: closed
    trying: bool = False  # half open, and the one request is on its way
    reason: str = ""  # of the last failure

    def state(self, now_s: float) -> State:
        if self.opened_s is None:
            return "closed"
        return "half open" if now_s - self.opened_s >= self._pause_s() else "open"

    def refuses(self, now_s: float) -> str:
        """Why no request goes there now; empty: one may."""
        state = self.state(now_s)
        if state == "closed" or (state == "half open" and not self.trying):
            return ""
        return f"failed {self.failures} times in a row ({self.reason})"

    def on_sent(self, now_s: float) -> None:
        self.trying = self.state(now_s) == "half open"

    def on_no_outcome(self) -> None:
        """Its client left, or it was full: that says nothing, and another may try."""
        self.trying = False

    def on_success(self) -> None:
        self.failures = self.opened = 0
        self.opened_s, self.trying, self.reason = None, False, ""

    def on_failure(self, now_s: float, reason: str) -> None:
        self.failures += 1
        self.reason = reason
        if self.trying or (self.opened_s is None and self.failures >= self.most_failures):
            self.opened += 1
            self.opened_s = now_s
        self.trying = False

    def _pause_s(self) -> float:
        return min(_LONGEST_PAUSE_S, self.pause_s * 2.0 ** max(0, min(self.opened, 10) - 1))
