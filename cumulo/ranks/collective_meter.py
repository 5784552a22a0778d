"""CollectiveMeter: how long this rank's collectives took, by kind, group size and bytes. The door in `collectives`
tells it, the trainer asks it after each step. CPU tensors only: on a GPU a call ends before its work does."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

# Bytes on the busiest link over bytes of the buffer, as nccl-tests counts bus bandwidth.
_BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Calls of one kind and size, together."""

    kind: str
    ranks: int
    size_bytes: int
    calls: int
    seconds: float

    @property
    def bus_bytes_per_s(self) -> float:
        share = _BUS[self.kind] * (self.ranks - 1) / self.ranks
        return self.calls * self.size_bytes * share / self.seconds if self.seconds else 0.0


class CollectiveMeter:
    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int], tuple[int, float]] = {}
        self._lock = threading.Lock()
        # Told of each call as it ends, in its thread, if someone measures: its kind, and the bytes of its buffer
        # that have left this rank.
        self.listener: Callable[[str, float], None] | None = None

    def add(
        self, kind: str, tensor: Tensor, ranks: int, began: float, sends: Sequence[int] | None = None
    ) -> None:
        """A call that began at this `time.perf_counter()` has ended. `sends`: rows of the buffer that have left for
        other ranks, where those are not equal shares."""
        if tensor.device.type != "cpu":
            return
        seconds, key = time.perf_counter() - began, (kind, ranks, tensor.nbytes)
        with self._lock:
            calls, so_far = self._found.get(key, (0, 0.0))
            self._found[key] = (calls + 1, so_far + seconds)
        if self.listener is not None:
            away = (ranks - 1) / ranks if sends is None else sum(sends) / max(1, len(tensor))
            self.listener(kind, tensor.nbytes * away)

    def take_times(self) -> list[CollectiveTime]:
        """Since it was last asked, the longest first."""
        with self._lock:
            found, self._found = self._found, {}
        times = [CollectiveTime(*key, calls, seconds) for key, (calls, seconds) in found.items()]
        return sorted(times, key=lambda one: -one.seconds)


meter = CollectiveMeter()
