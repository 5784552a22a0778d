"""What papers call active parameters, from the operations of a model."""

from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import model_operations


def active_parameter_count(spec: ModelSpec) -> int:
    """Parameters one token meets: of the routed experts only those it is sent to."""
    return sum(
        weight.size * operation.product.choices // operation.product.experts
        if operation.product
        else weight.size
        for _, operation in model_operations(spec)
        for weight in operation.weights
    )
