"""What a GPU reaches at best, measured, and the least time the steps of a run could take on it. `gpu.py` shows it
beside each figure."""

from dataclasses import dataclass, field
from typing import Any

import torch

from cumulo.engine.decide.plan import StepPlan
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import MatrixProduct, model_operations


@dataclass
class GpuCeilings:
    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float


def measure_ceilings() -> GpuCeilings:
    """Copy bandwidth (read and written) and the rates of large products of random data."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)

    def best_s(work: Any) -> float:
        work()
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return min(times)

    bandwidth = 2 * source.nbytes / best_s(lambda: target.copy_(source))
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * n**3 / best_s(lambda: a @ b)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device="cuda")
    fp8 = (
        2
        * n**3
        / best_s(lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
    )
    return GpuCeilings(bandwidth, flops, fp8)


@dataclass
class Roofline:
    """Adds up the least time of every step a runner is given."""

    spec: ModelSpec
    ceilings: GpuCeilings
    weight_bytes: float  # of one parameter
    kv_bytes_per_token: int
    floor_s: float = 0.0
    steps: int = 0
    seen: list[tuple[int, int]] = field(default_factory=list)

    def add_step(self, plan: StepPlan) -> None:
        if not plan.slots:
            return
        spec, tokens = self.spec, plan.tokens
        contexts = sum(start + count for start, count in zip(plan.starts, plan.counts, strict=True))
        pairs = sum(c * s + c * (c + 1) // 2 for s, c in zip(plan.starts, plan.counts, strict=True))
        layers = [found for index, found in model_operations(spec, "serve") if index is not None]
        products = [found.product for found in layers if found.product]
        read = sum(one.outputs * one.inputs * experts_hit(one, tokens) for one in products)
        head = spec.vocab_size * spec.hidden
        moved = self.weight_bytes * read + 2 * head + contexts * self.kv_bytes_per_token
        rate = self.ceilings.fp8_flops_per_s if self.weight_bytes == 1 else self.ceilings.flops_per_s
        compute_s = sum(found.forward_flops(tokens) for found in layers) / rate
        compute_s += 2 * len(plan.draw_rows) * head / self.ceilings.flops_per_s
        compute_s += sum(found.forward_flops(0, pairs) for found in layers) / self.ceilings.flops_per_s
        self.floor_s += max(moved / self.ceilings.bytes_per_s, compute_s)
        self.steps += 1


def experts_hit(product: MatrixProduct, tokens: int) -> float:
    """Experts that some of so many tokens are sent to, if routing is even."""
    return product.experts * (1 - (1 - product.choices / product.experts) ** tokens)
