"""Speed, MFU and memory of a run, by conventions that are stated here. Used by the trainer.

MFU (Chowdhery et al. 2022, appendix B) is the model's FLOPs over what the device could do in the time: three times
the forward pass (backward is two), attention to what a causal mask shows on average, recomputation not counted.
The device's best is its data sheet's dense figure for GPUs in the table, elsewhere a matrix product, timed.
"""

import math
import resource
import sys
import time
from functools import cache

import torch

from cumulo.spec.counting import flops_per_token
from cumulo.spec.model import ModelSpec

# Dense bfloat16 FLOP/s by the makers' data sheets.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "B200": 2250e12}


def training_flops_per_token(spec: ModelSpec, sequence_length: int, frozen: bool = False) -> int:
    """`frozen`: the model's own weights are not trained, so their gradients are not computed; adapters' own work is
    left out."""
    forward = flops_per_token(spec, (sequence_length + 1) // 2)
    return 3 * forward - (flops_per_token(spec, 0) if frozen else 0)


class Ceiling:
    """What the devices of a run could do at best, in FLOP/s. A GPU's is its data sheet's; any other is the best of
    several matrix products, timed. Other programs may be busy meanwhile: where a run is faster, it is timed again,
    and a share that cannot be is not told."""

    def __init__(self, device: torch.device, dtype: torch.dtype, ranks: int = 1) -> None:
        self._device, self._dtype, self._ranks = device, dtype, ranks
        self._again = 2  # times it may be measured anew
        sheet = _data_sheet(device, dtype)
        self.source = "a matrix product timed here" if sheet is None else f"{sheet[0]}'s data sheet"
        self._sheet = sheet is not None
        self.flops = ranks * (_first_measured(device, dtype) if sheet is None else sheet[1])

    def measure_again(self) -> None:
        if not self._sheet and self._again:
            self._again -= 1
            self.flops = max(self.flops, self._ranks * _measured(self._device, self._dtype))

    def share(self, flops: float) -> float:
        """The share of the ceiling; not a number where it would be more than all."""
        if flops > self.flops:
            self.measure_again()
        return flops / self.flops if flops <= self.flops else math.nan


def _data_sheet(device: torch.device, dtype: torch.dtype) -> tuple[str, float] | None:
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next(((part, peak) for part, peak in _PEAKS.items() if part in name), None)


@cache
def _first_measured(device: torch.device, dtype: torch.dtype) -> float:
    """Once for all runs of this process."""
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    """The best of products of a few sizes, over a fifth of a second: a busy machine shows its best now and then."""
    if device.type != "cpu":
        return _best_product(device, dtype, 8192, 0.1)
    # The first product is small, as a large one would take seconds without instructions for this dtype, and uses
    # one thread: on a busy machine two would wait for each other, and make it look slow.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = _best_product(device, dtype, 96, 0.01)
    finally:
        torch.set_num_threads(threads)
    for size in (384, 768):
        if 2 * size**3 / best > 0.1:
            break  # one product would take longer than all should
        best = max(best, _best_product(device, dtype, size, 0.1))
    return best


def _best_product(device: torch.device, dtype: torch.dtype, size: int, for_s: float) -> float:
    """FLOP/s of the quickest of at least five products."""
    a = torch.randn(size, size, device=device).to(dtype)
    best_s, spent_s, products = math.inf, 0.0, 0
    while spent_s < for_s or products < 5:
        _wait(device)
        begin = time.perf_counter()
        a @ a
        _wait(device)
        took_s = time.perf_counter() - begin
        best_s, spent_s, products = min(best_s, took_s), spent_s + took_s, products + 1
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
