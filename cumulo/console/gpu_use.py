"""GpuUse: how busy the machine's NVIDIA GPUs are, asked of the driver's own library (NVML). Used by MachineUse.

Called by its C interface, so nothing must be installed; where there is no driver there are no GPUs to show. The
names are those of NVIDIA's NVML API reference.
"""

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    utilization_percent: int  # share of the last sample period in which a kernel ran
    used_bytes: int
    total_bytes: int


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuUse:
    def __init__(self) -> None:
        self._nvml: ctypes.CDLL | None = None
        self._devices: list[ctypes.c_void_p] = []
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if library.nvmlInit_v2() != 0:
            return
        self._nvml = library
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for index in range(count.value):
            device = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                self._devices.append(device)

    def read(self) -> list[Gpu]:
        found = []
        for device in self._devices:
            assert self._nvml is not None
            busy, memory = _Utilization(), _Memory()
            answers = (
                self._nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)),
                self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)),
            )
            if answers == (0, 0):
                found.append(Gpu(int(busy.gpu), int(memory.used), int(memory.total)))
        return found
