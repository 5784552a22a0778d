"""MachineUse: CPU, memory and GPU use of this machine, sampled every few seconds. Shown by the Live page.

Read from /proc, as top does; on systems without it there is nothing to show. A sample takes a few milliseconds at
most and is taken whether or not a page looks, so that a page has an hour to show when it opens.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cumulo.console.gpu_use import Gpu, GpuUse

SAMPLE_S = 5.0
_KEPT = int(3600 / SAMPLE_S)


@dataclass(frozen=True, slots=True)
class UseSample:
    time_s: float  # monotonic clock
    cpu_percent: float  # of all cores
    memory_used_bytes: int
    memory_total_bytes: int
    engine_bytes: int | None  # resident memory of the engines' processes
    server_bytes: int | None
    gpus: tuple[Gpu, ...] = ()

    @property
    def memory_percent(self) -> float:
        return 100 * self.memory_used_bytes / self.memory_total_bytes


class MachineUse:
    def __init__(self, engine_pids: Callable[[], tuple[int, ...]], proc: Path = Path("/proc")) -> None:
        self.samples: deque[UseSample] = deque(maxlen=_KEPT)
        self._engine_pids, self._proc = engine_pids, proc
        self._before: tuple[int, int] | None = None  # busy and all ticks when last looked
        self._gpus: GpuUse | None = None

    async def run(self) -> None:
        """Sample until cancelled."""
        self._gpus = await asyncio.to_thread(GpuUse)  # opening a driver may take a while
        # In a thread: a GPU's driver takes its milliseconds, which belong to the streams.
        while await asyncio.to_thread(self.sample):
            await asyncio.sleep(SAMPLE_S)

    def sample(self) -> bool:
        """Whether there was something to read."""
        try:
            busy, total = _ticks((self._proc / "stat").read_text("ascii"))
            memory_total, available = _memory((self._proc / "meminfo").read_text("ascii"))
        except (OSError, ValueError, IndexError, KeyError):
            return False
        before, self._before = self._before, (busy, total)
        if before is None:  # use is the difference of two looks
            return True
        before_busy, before_total = before
        cpu_percent = 100 * (busy - before_busy) / max(1, total - before_total)
        self.samples.append(
            UseSample(
                time.perf_counter(),
                cpu_percent,
                memory_total - available,
                memory_total,
                self._resident_of_all(self._engine_pids()),
                self._resident(os.getpid()),
                tuple(self._gpus.read()) if self._gpus is not None else (),
            )
        )
        return True

    def _resident_of_all(self, pids: tuple[int, ...]) -> int | None:
        sizes = [size for pid in pids if (size := self._resident(pid)) is not None]
        return sum(sizes) if sizes else None

    def _resident(self, pid: int) -> int | None:
        try:
            pages = int((self._proc / str(pid) / "statm").read_text("ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")


def _ticks(stat: str) -> tuple[int, int]:
    """Busy and all clock ticks of all cores since boot; waiting for a disk is not busy."""
    user, nice, system, idle, iowait, *rest = map(int, stat.split("\n", 1)[0].split()[1:9])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + iowait


def _memory(meminfo: str) -> tuple[int, int]:
    """Total and available bytes."""
    sizes = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    total_kib, available_kib = (int(sizes[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return total_kib << 10, available_kib << 10
