"""Speed, MFU and memory of a run, by conventions that are stated here. Used by the trainer.

MFU (Chowdhery et al. 2022, appendix B) is the model's FLOPs over what the device could do in the time: three times
the forward pass (backward is two), attention to what a causal mask shows on average, recomputation not counted.
The device's best is its data sheet's dense figure for GPUs in the table, elsewhere a matrix product, timed.
"""

import resource
import sys
import time
from functools import cache

import torch

from cumulo.spec.counting import flops_per_token
from cumulo.spec.model import ModelSpec

# Dense bfloat16 FLOP/s by the makers' data sheets.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "B200": 2250e12}


def training_flops_per_token(spec: ModelSpec, sequence_length: int) -> int:
    return 3 * flops_per_token(spec, (sequence_length + 1) // 2)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s, and where the figure is from."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in _PEAKS.items():
            if part in name:
                return peak, f"{part}'s data sheet"
    return _measured(device, dtype), "a matrix product timed here"


@cache
def _measured(device: torch.device, dtype: torch.dtype) -> float:
    size = 384 if device.type == "cpu" else 8192
    a = torch.ones(size, size, dtype=dtype, device=device)
    best_s, spent_s = float("inf"), 0.0
    while spent_s < 0.05:
        _wait(device)
        begin = time.perf_counter()
        a @ a
        _wait(device)
        took_s = time.perf_counter() - begin
        best_s, spent_s = min(best_s, took_s), spent_s + took_s
    return 2 * size**3 / best_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most this process has held: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
