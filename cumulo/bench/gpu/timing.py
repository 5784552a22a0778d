"""Device time of a piece of work, as it will run in the engine: inside a CUDA graph; and KernelRow, which is one
operation at one shape, timed.

A graph hides the cost of launching from Python, which the engine does not pay either. Inputs that fit in the L2
cache are rotated, or a repeated run would measure the cache.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

L2_BYTES = 64 << 20  # of the largest devices we time on, rounded up


@dataclass(frozen=True, slots=True)
class Work:
    """The fewest bytes through device memory (every input read once, every output written once) and the FLOPs."""

    bytes: int
    flops: int = 0

    def floor_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """No version runs faster than this."""
        return 1e6 * max(self.bytes / bytes_per_s, self.flops / flops_per_s)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One operation at one shape, timed: ours, and whoever else can do it."""

    name: str  # the operation
    shape: str  # in words a reader knows: "B=64 ctx=4096 32/8 heads d=128"
    work: Work
    ours_us: float
    rivals_us: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "bfloat16"  # picks the arithmetic ceiling
    config: str = ""  # the tile sizes and so on that were used
    # Relative, against the reference in float64 or float32: wrong and fast is no result.
    error: float | None = None
    must_us: float | None = None
    aim_us: float | None = None

    @property
    def tb_s(self) -> float:
        return self.work.bytes / self.ours_us / 1e6

    @property
    def tflop_s(self) -> float:
        return self.work.flops / self.ours_us / 1e6


def timed(
    name: str,
    shape: str,
    work: Work,
    ours: Callable[[int], object],
    copies: int = 1,
    rivals: Mapping[str, Callable[[int], object]] | None = None,
    repeats: int = 20,
    **more: Any,
) -> KernelRow:
    """A row of work that is timed in graphs; `more` are fields of KernelRow."""
    others = {other: graph_us(work, copies, repeats) for other, work in (rivals or {}).items()}
    return KernelRow(name, shape, work, graph_us(ours, copies, repeats), others, **more)


def graph_us(work: Callable[[int], object], copies: int = 1, repeats: int = 20, rounds: int = 7) -> float:
    """Median microseconds of one `work(i)`, where i cycles through `copies` sets of inputs.

    One graph holds `repeats` runs, at least one of each set; it is replayed `rounds` times.
    """
    repeats = max(repeats, copies)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(min(3, repeats)):
            work(index % copies)  # compiles, and lets libraries make their workspaces
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(repeats):
            work(index % copies)
    return eager_us(graph.replay, rounds, warmup=1) / repeats


def eager_us(work: Callable[[], object], rounds: int = 15, warmup: int = 2) -> float:
    """Median microseconds of work that cannot be captured or runs long enough not to need it."""
    for _ in range(warmup):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)))
    return float(median(times))


def copies_past_cache(bytes_each: int, limit: int = 64) -> int:
    """How many sets of inputs it takes so that none is still in the cache when its turn comes again."""
    return max(1, min(limit, -(-3 * L2_BYTES // max(1, bytes_each))))


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.to(exact.dtype) - exact).norm() / exact.norm())


def randn(*shape: int, std: float = 1.0) -> Tensor:
    """Random numbers in bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda").mul_(std).bfloat16()
