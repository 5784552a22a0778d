"""Sizes that follow from a ModelSpec: parameters, bytes, FLOPs per token. For memory ledger and planner."""

import math

from cumulo.errors import ModelError
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import model_operations

# Names and shapes of a decoder's parameters, from its spec alone. Read by the naming tables, the memory
# ledger and the planner, which must know a model's size before anything is allocated.
#
# Names are those of `cumulo.models.decoder.Decoder`; fused parameters are fused here too.

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Every parameter of the decoder in the order of computation: name to shape."""
    return {
        weight.name if layer is None else f"layers.{layer}.{weight.name}": weight.shape
        for layer, operation in model_operations(spec)
        for weight in operation.weights
    }


# Scales and minima of the quantised kinds included: a Q4_0 block is 32 4-bit numbers and one float16.
BITS_PER_WEIGHT = {
    "float64": 64.0, "float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float8": 8.0, "int8": 8.0,
    "q8_0": 8.5, "q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_1": 6.0,
    "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625,
    "int4": 4.25,  # a float32 scale for 128
    "float4": 4.5,  # an 8-bit scale for 16
}  # fmt: skip


def parameter_count(spec: ModelSpec) -> int:
    """All parameters; a tied embedding counts once."""
    return sum(weight.size for _, operation in model_operations(spec) for weight in operation.weights)


def weight_bytes(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of all weights in `dtype` (None: as the spec says they are stored)."""
    name = dtype or spec.dtype
    if name not in BITS_PER_WEIGHT:
        raise ModelError(f"unknown weight type {name!r}; known: {', '.join(BITS_PER_WEIGHT)}")
    return math.ceil(parameter_count(spec) * BITS_PER_WEIGHT[name] / 8)


def flops_per_token(spec: ModelSpec, context_length: int) -> int:
    """FLOPs of one forward step for one token that attends to `context_length` positions, itself included.

    Two per weight of every matrix product (a multiply and an add), and two per element of the attention
    scores and of their product with the values. Norms, rotation and softmax are left out: below 1%.
    Latent attention is counted in the absorbed form, in which it is computed.
    """
    flops = 0.0
    for layer, operation in model_operations(spec, "serve"):
        window = None if layer is None else spec.window_of_layer(layer)
        flops += operation.forward_flops(1, min(context_length, window or context_length))
    return int(flops)
