"""LinkShaper: a network slower than this host. What a rank sends over TCP leaves no faster than the network's rate;
waiting sleeps, so that it costs no core. The rate is that of the rank's card, which carries all its connections,
or of each connection, as where a window, a path or a queue pair bounds it. `cumulo bench overlap` uses it."""

import threading
import time

# Of a card's time, that one message takes before the next one's turn. Each slice costs a core a wake-up, so that
# short ones would slow down what they are to measure.
_SLICE_S = 20e-3
_WHOLE_S = 1.0  # ... of a connection, which has no other message to let in: few are longer
_LEAST_BYTES = 4096


class LinkShaper:
    def __init__(self, bytes_per_s: float, each_connection: bool = False) -> None:
        self.bytes_per_s, self.each_connection = bytes_per_s, each_connection
        self._free_s: dict[int, float] = {}  # when all that was granted has been sent
        self._lock = threading.Lock()

    def grant(self, wanted: int, goes_on: bool, connection: int) -> tuple[int, float]:
        """(bytes, the `time.monotonic()` at which they have left). `goes_on`: the message has been waiting for the
        card all the time, so that a late wake-up is made up for."""
        slice_s = _WHOLE_S if self.each_connection else _SLICE_S
        count = min(wanted, max(_LEAST_BYTES, int(self.bytes_per_s * slice_s)))
        key = connection if self.each_connection else -1
        with self._lock:
            free_s = self._free_s.get(key, 0.0)
            begin = free_s if goes_on else max(free_s, time.monotonic())
            self._free_s[key] = begin + count / self.bytes_per_s
            return count, self._free_s[key]
