"""Rejections: calls that were refused before they reached the engine, with the reason. Noted by the gate.

They have no story, yet who operates a server wants to see them next to the requests that have one. The text of the
request is not kept, only what the client was told.
"""

import json
from collections import deque
from dataclasses import dataclass
from itertools import chain

MOST_REASON_BYTES = 4096  # of the answer that refused it


@dataclass(frozen=True, slots=True)
class Rejection:
    received_s: float  # monotonic clock
    took_s: float
    path: str
    status: int
    caller: str | None  # None: nobody knows; no valid key was sent
    answer: bytes  # as the client got it, its beginning

    @property
    def reason(self) -> str:
        """Read only where somebody looks: many refusals a second must cost little."""
        try:
            return str(json.loads(self.answer)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return self.answer.decode("utf-8", "replace")[:200] or f"status {self.status}"


class Rejections:
    """The last ones. Strangers without a key cannot push out those of callers."""

    def __init__(self, capacity: int) -> None:
        self._of_callers: deque[Rejection] = deque(maxlen=capacity)
        self._of_strangers: deque[Rejection] = deque(maxlen=min(capacity, 200))

    def note(self, rejection: Rejection) -> None:
        (self._of_strangers if rejection.caller is None else self._of_callers).append(rejection)

    def recent(self) -> list[Rejection]:
        """Newest first."""
        both = chain(self._of_callers, self._of_strangers)
        return sorted(both, key=lambda one: one.received_s, reverse=True)
