"""Names and shapes of a decoder's parameters, from its spec alone. Read by the naming tables, the memory
ledger and the planner, which must know a model's size before anything is allocated.

Names are those of `cumulo.models.decoder.Decoder`; fused parameters are fused here too.
"""

from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import model_operations

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Every parameter of the decoder in the order of computation: name to shape."""
    return {
        weight.name if layer is None else f"layers.{layer}.{weight.name}": weight.shape
        for layer, operation in model_operations(spec)
        for weight in operation.weights
    }
