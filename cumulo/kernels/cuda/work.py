"""Work: what an operation must move and compute, from its shapes; and one benchmark row. Every op file makes them.

A ceiling is measured on the device, not read off its datasheet: `cumulo bench kernels` puts both beside a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
