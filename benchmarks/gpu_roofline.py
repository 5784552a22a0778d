"""The least time that the steps of a run could take on a GPU whose ceilings were measured. `gpu.py` shows it beside
each figure."""

from dataclasses import dataclass

from cumulo.bench.gpu.report import Ceilings
from cumulo.engine.decide.plan import StepPlan
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import MatrixProduct, model_operations


@dataclass
class Roofline:
    """Adds up the least time of every step a runner is given."""

    spec: ModelSpec
    ceilings: Ceilings
    weight_bytes: float  # of one parameter
    kv_bytes_per_token: int
    floor_s: float = 0.0
    steps: int = 0

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
        rate = self.ceilings.flops_per_s("fp8" if self.weight_bytes == 1 else "bfloat16")
        bf16_rate = self.ceilings.bf16_flops_per_s
        compute_s = sum(found.forward_flops(tokens) for found in layers) / rate
        compute_s += 2 * len(plan.draw_rows) * head / bf16_rate
        compute_s += sum(found.forward_flops(0, pairs) for found in layers) / bf16_rate
        self.floor_s += max(moved / self.ceilings.bytes_per_s, compute_s)
        self.steps += 1


def experts_hit(product: MatrixProduct, tokens: int) -> float:
    """Experts that some of so many tokens are sent to, if routing is even."""
    return product.experts * (1 - (1 - product.choices / product.experts) ** tokens)
