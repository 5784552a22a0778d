"""Seconds that computing single operations again adds to a layer's backward, without what is sent again. The cost
model calls it.

The operations are those of cumulo.train: the norm before a block's first product, the feed-forward's activation,
and attention between its projections.
"""

from cumulo.plan.job import TrainJob
from cumulo.plan.time.compute import Passes, Seconds, moved_numbers
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import Share, layer_operations


def operations_again(job: TrainJob, has_experts: bool, plain: Passes) -> Seconds:
    """`plain`: the layer without communication."""
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
    )


def _product_share(model: ModelSpec, has_experts: bool) -> float:
    """Of a layer's products, those that are part of attention's recomputation: between latents and heads."""
    products = [found for found in layer_operations(model, has_experts) if found.family == "matmul"]
    again, every = (
        sum(found.product.weights_per_token for found in products if found.product and found.again in names)
        for names in (("attention",), ("attention", None))
    )
    return again / every
