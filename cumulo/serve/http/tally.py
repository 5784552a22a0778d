"""Tally: counts what the transport refuses or closes, and logs it without a flood. Shared by all connections.

The first event of a kind is logged at once; those that follow within a few seconds are told in one line.
"""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_EVERY_S = 5.0


class Tally:
    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count  # gets every reason: the metrics' counter
        self._untold: dict[str, int] = {}  # events by reason since its last line
        self._told_s: dict[str, float] = {}

    def note(self, reason: str, message: str, *details: object) -> None:
        """`reason` is one of a few fixed words: a label of the metrics and of the log."""
        self._count(reason)
        now_s = time.monotonic()
        if now_s - self._told_s.get(reason, -_EVERY_S) >= _EVERY_S:
            self._told_s[reason] = now_s
            log.warning("%s: " + message, reason, *details)
        else:
            self._untold[reason] = self._untold.get(reason, 0) + 1

    def count(self, reason: str) -> None:
        """For what is ordinary: in the metrics, not in the log."""
        self._count(reason)

    def flush(self) -> None:
        """Tell what has not been told; called every second or so."""
        now_s = time.monotonic()
        for reason, times in list(self._untold.items()):
            if now_s - self._told_s[reason] >= _EVERY_S:
                self._told_s[reason] = now_s
                del self._untold[reason]
                log.warning("%s: %d more in the last %.0f s", reason, times, _EVERY_S)
