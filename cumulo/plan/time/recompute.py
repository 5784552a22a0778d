"""Seconds that computing single operations again adds to a layer's backward, and messages that are sent again. The
cost model calls it.

The operations are those of cumulo.train: the norm before a block's first product (with sequence parallelism also
the gathering between them), the feed-forward's activation, and attention between its projections.
"""

from typing import NamedTuple

from cumulo.plan.job import TrainJob
from cumulo.plan.time.compute import Passes, Seconds, moved_numbers
from cumulo.spec.model import ModelSpec


def operations_again(job: TrainJob, has_experts: bool, plain: Passes, waits: Seconds) -> Seconds:
    """`plain`: the layer without communication; `waits`: for other ranks, in its forward."""
    operations, forward = job.recomputed_operations, plain.forward
    numbers = _moved_numbers(job, has_experts)
    moved = sum(numbers[name] for name in operations) / numbers["all"]
    attention = "attention" in operations
    return Seconds(
        matmul=_product_share(job.model, has_experts) * forward.matmul if attention else 0.0,
        attention=forward.attention if attention else 0.0,
        elementwise=moved * forward.elementwise,
        # A gather and a scatter of the same bytes were waited for, around each of two blocks.
        tensor=waits.tensor * _norms(has_experts) / 4 if _gathers_again(job) else 0.0,
        context=waits.context if attention else 0.0,
    )


class SentAgain(NamedTuple):
    """Bytes that recomputation sends, as a share of what forward does, on average over the layers."""

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0


def sent_again(job: TrainJob) -> SentAgain:
    model = job.model
    if job.recompute == "full":
        most = model.layers if job.recompute_layers is None else job.recompute_layers
        share = sum(min(most, layers) for layers in job.chunk_layers) / model.layers
        return SentAgain(share, share, share)
    norms = sum(_norms(model.is_moe_layer(layer)) for layer in range(model.layers)) / model.layers
    return SentAgain(
        tensor=norms / 4 if _gathers_again(job) else 0.0,
        context=1.0 if "attention" in job.recomputed_operations else 0.0,
    )


def _gathers_again(job: TrainJob) -> bool:
    return "norm" in job.recomputed_operations and job.layout.sequence_parallel


def _norms(has_experts: bool) -> int:
    """Of a layer's two, those computed again: one before experts feeds the router too, and is kept."""
    return 1 if has_experts else 2


def _moved_numbers(job: TrainJob, has_experts: bool) -> dict[str, float]:
    """Of one token in forward, by operation, as the cost model counts them (docs/plan-time.md): 8 h for two
    residual additions and norms, of which a norm by itself reads and writes h."""
    model, layout = job.model, job.layout
    between = layout.tp if layout.sequence_parallel else 1
    stream, rotated, activated = moved_numbers(model, has_experts)
    return {
        "norm": _norms(has_experts) * 2 * model.hidden / between,
        "activation": activated / layout.tp,
        "attention": rotated / layout.tp,
        "all": stream / between + (rotated + activated) / layout.tp,
    }


def _product_share(model: ModelSpec, has_experts: bool) -> float:
    """Of a layer's products, those between latents and heads: they are part of latent attention's recomputation."""
    if model.mla is None:
        return 0.0
    mla, hidden = model.mla, model.hidden
    query = model.heads * (mla.nope_head_dim + mla.rope_head_dim)
    inner = mla.kv_rank * model.heads * (mla.nope_head_dim + mla.value_head_dim) + (mla.q_rank or 0) * query
    outer = hidden * (
        mla.kv_rank + mla.rope_head_dim + (mla.q_rank or query) + model.heads * mla.value_head_dim
    )
    width = model.ffn_hidden
    if has_experts and model.moe is not None:
        width = model.moe.experts_per_token * model.moe.expert_hidden + model.moe.shared_hidden
    return inner / (inner + outer + (3 if model.gated_ffn else 2) * width * hidden)
