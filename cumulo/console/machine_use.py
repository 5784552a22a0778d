"""MachineUse: CPU, memory and GPU use of this machine, sampled every few seconds. Shown by the Live page.

psutil reads the system and pynvml asks NVIDIA's driver; where one of them is missing, its part is not shown. A
sample takes a few milliseconds at most and is taken whether or not a page looks, so that a page has an hour to
show when it opens.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

try:
    import psutil
except ImportError:
    psutil = None
try:
    import pynvml
except ImportError:
    pynvml = None

SAMPLE_S = 5.0
_KEPT = int(3600 / SAMPLE_S)


@dataclass(frozen=True, slots=True)
class Gpu:
    utilization_percent: int  # share of the last sample period in which a kernel ran
    used_bytes: int
    total_bytes: int


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
    def __init__(self, engine_pids: Callable[[], tuple[int, ...]]) -> None:
        self.samples: deque[UseSample] = deque(maxlen=_KEPT)
        self._engine_pids = engine_pids
        self._gpus: list[Any] = []  # NVML's handles

    async def run(self) -> None:
        """Sample until cancelled."""
        if psutil is None:
            return
        psutil.cpu_percent()  # use is the difference of two looks
        self._gpus = await asyncio.to_thread(_gpu_handles)  # opening a driver may take a while
        while True:
            await asyncio.sleep(SAMPLE_S)
            # In a thread: a GPU's driver takes its milliseconds, which belong to the streams.
            await asyncio.to_thread(self.sample, psutil.cpu_percent())

    def sample(self, cpu_percent: float) -> None:
        """`cpu_percent` is asked for in the same thread each time: psutil keeps the look before for each thread."""
        memory = psutil.virtual_memory()
        engines = [size for pid in self._engine_pids() if (size := _resident_bytes(pid)) is not None]
        self.samples.append(
            UseSample(
                time.perf_counter(),
                cpu_percent,
                memory.total - memory.available,
                memory.total,
                sum(engines) if engines else None,
                _resident_bytes(os.getpid()),
                tuple(map(_gpu, self._gpus)),
            )
        )


def _resident_bytes(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def _gpu_handles() -> list[Any]:
    """NVML's handles; an empty list where there is no driver."""
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _gpu(handle: Any) -> Gpu:
    """What the driver does not tell is shown as 0."""
    try:
        busy, memory = pynvml.nvmlDeviceGetUtilizationRates(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return Gpu(0, 0, 0)
    return Gpu(int(busy.gpu), int(memory.used), int(memory.total))
