"""Seconds that computing single operations again adds to a layer's backward, and messages that are sent again. The
cost model calls it.

The operations are those of cumulo.train: the norm before a block's first product (with sequence parallelism also
the gathering between them), the feed-forward's activation, and attention between its projections.
"""

from typing import NamedTuple

from cumulo.plan.job import TrainJob
from cumulo.plan.time.compute import Passes, Seconds, moved_numbers
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import Share, layer_operations


def operations_again(job: TrainJob, has_experts: bool, plain: Passes, waits: Seconds) -> Seconds:
    """`plain`: the layer without communication; `waits`: for other ranks, in its forward."""
    operations, forward = job.recomputed_operations, plain.forward
    layout = job.layout
    share = Share(layout.tp, layout.tp if layout.sequence_parallel else 1)
    numbers = moved_numbers(job.split_model, has_experts, share)
    moved = sum(numbers.get(name, 0.0) for name in operations) / sum(numbers.values())
    attention = "attention" in operations
    return Seconds(
        matmul=_product_share(job.split_model, has_experts) * forward.matmul if attention else 0.0,
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


def _product_share(model: ModelSpec, has_experts: bool) -> float:
    """Of a layer's products, those that are part of attention's recomputation: between latents and heads."""
    products = [found for found in layer_operations(model, has_experts) if found.family == "matmul"]
    again, every = (
        sum(found.product.weights_per_token for found in products if found.product and found.again in names)
        for names in (("attention",), ("attention", None))
    )
    return again / every
