"""Every GPU kernel's rows beside ceilings measured in the same run. `cumulo bench kernels` prints them on a GPU.

A row's value is its time; the rest says how much of the roofline that is, how many times slower each rival was,
and how wrong the result. An operation that fails is a row with its error, and the table goes on.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cumulo.base.report import Row, shown
from cumulo.bench.gpu import attention, operations, products
from cumulo.bench.gpu.timing import KernelRow, eager_us
from cumulo.kernels.cuda import registry

WRONG = 0.05  # a relative error no rounding explains: 8-bit products lose about half of it
Tell = Callable[[str], None]

OPERATIONS: dict[str, Callable[[], Iterator[KernelRow]]] = {
    "paged_attention": attention.paged_rows,
    "latent_attention": attention.latent_rows,
    "flash_attention": attention.dense_rows,
    "linear": products.linear_rows,
    "invariant_matmul": products.invariant_rows,
    "fp8_quantise": operations.quantise_rows,
    "rms_norm": operations.norm_rows,
    "rope": operations.rope_rows,
    "rotate": operations.rotate_rows,
    "swiglu": operations.swiglu_rows,
    "sample": operations.sample_rows,
    "linear_cross_entropy": operations.loss_rows,
    "moe": operations.moe_rows,
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches at best, measured: nothing here is from a datasheet."""

    bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None  # None: no 8-bit units

    @classmethod
    def measured(cls) -> "Ceilings":
        size = 8192
        source = torch.randint(-100, 100, (1 << 28,), dtype=torch.int32, device="cuda")  # 1 GiB
        target = torch.empty_like(source)
        # Not in a graph, where a copy is left to the copy engines, which are slower than kernels. The first is of a
        # chip that has not yet raised its clocks.
        copy_us = min(eager_us(lambda: target.copy_(source)) for _ in range(3))
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out = torch.empty_like(a)
        flops = 2 * size**3
        bf16_us = eager_us(lambda: torch.mm(a, b, out=out))
        fp8_us = None
        if torch.cuda.get_device_capability() >= (8, 9):
            one = torch.ones((), device="cuda")
            left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            fp8_us = eager_us(
                lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
            )
        return cls(
            1e6 * 2 * source.nbytes / copy_us,
            1e6 * flops / bf16_us,
            None if fp8_us is None else 1e6 * flops / fp8_us,
        )

    def flops_per_s(self, dtype: str) -> float:
        eight_bit = "float8" in dtype or "fp8" in dtype
        return self.fp8_flops_per_s if eight_bit and self.fp8_flops_per_s else self.bf16_flops_per_s

    def share(self, row: KernelRow) -> float:
        """The share of the roofline: 1 is the fastest that memory and matrix units allow."""
        return row.work.floor_us(self.bytes_per_s, self.flops_per_s(row.dtype)) / row.ours_us

    def rows(self) -> Iterator[Row]:
        for name, value, unit in (
            ("copy, read and written", self.bytes_per_s, "TB/s"),
            ("bfloat16 product, 8192 cubed", self.bf16_flops_per_s, "TFLOP/s"),
            ("8-bit product, 8192 cubed", self.fp8_flops_per_s, "TFLOP/s"),
        ):
            if value is not None:
                yield Row(f"ceiling: {name}", round(value / 1e12, 3), unit)


def rows(only: Sequence[str] = (), tell: Tell = lambda line: None) -> list[Row]:
    """With `only`: the rows of operations whose name holds one of the words."""
    registry.load_for(registry.device_name("cuda"))
    tell("measuring the device's ceilings")
    ceilings = Ceilings.measured()
    found = list(ceilings.rows())
    for name in OPERATIONS:
        if not only or any(word in name for word in only):
            for row in guarded(name, ceilings):
                tell(f"{row.name}: {shown(row)}")
                found.append(row)
            gc.collect()
            torch.cuda.empty_cache()
    return found


def guarded(name: str, ceilings: Ceilings) -> Iterator[Row]:
    """The rows of one operation, up to the one that fails."""
    try:
        for row in OPERATIONS[name]():
            yield as_row(row, ceilings)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        yield Row(name, None, "us", "lower", must=0.0, note=reason)


def as_row(row: KernelRow, ceilings: Ceilings) -> Row:
    """A row for the report. A wrong result is no time at all, however short it took."""
    share = ceilings.share(row)
    by_memory = row.work.bytes / ceilings.bytes_per_s >= row.work.flops / ceilings.flops_per_s(row.dtype)
    wrong = row.error is not None and not row.error <= WRONG
    notes = [
        f"{row.tb_s:.2f} TB/s" if by_memory else f"{row.tflop_s:.0f} TFLOP/s",
        f"{100 * share:.0f}% of roofline",
        *(f"{us / row.ours_us:.2f}x {name}" for name, us in row.rivals_us.items()),
    ]
    if row.error is not None:
        notes.append(f"{'WRONG: ' if wrong else ''}error {row.error:.2g}")
    more = {
        "tb_s": round(row.tb_s, 3),
        "tflop_s": round(row.tflop_s, 1),
        "roofline_share": round(share, 3),
        "bound": "memory" if by_memory else "arithmetic",
        "rivals_us": {name: round(us, 2) for name, us in row.rivals_us.items()},
        "error": None if row.error is None or row.error != row.error else row.error,
        "config": row.config,
    }
    value, must = (
        None if wrong else round(row.ours_us, 2),
        0.0 if wrong and row.must_us is None else row.must_us,
    )
    name = f"{row.name}, {row.shape}"
    return Row(name, value, "us", "lower", must, row.aim_us, ", ".join(notes), more)
