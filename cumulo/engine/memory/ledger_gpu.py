"""What the GPU's decoder, sampler and weights will hold, to the byte, from the spec alone. The memory ledger's GPU
rows, and the assembly before it plans.
"""

from functools import lru_cache

from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import layer_operations, model_operations

# Multiplied otherwise than by the quantised products: the router in float32, kv_b per head.
_NEVER_QUANTISED = ("ffn.router.weight", "attention.kv_b.weight")
INT4_GROUP = 128  # weights that share a scale; rows that it does not divide stay as they are


def quantised_saved_bytes(spec: ModelSpec, bytes_per_element: int, kind: str) -> int:
    """What weights=fp8 or int4 frees: the layers' matrices shrink to a byte a number and four for each row's scale,
    or to half a byte and four for each group's. Embedding, head and routed experts stay as they are."""
    if kind == "auto":
        return 0
    matrices = (
        weight
        for layer, operation in model_operations(spec)
        for weight in operation.weights
        if layer is not None and len(weight.shape) == 2 and weight.name not in _NEVER_QUANTISED
    )
    if kind == "fp8":
        return sum(weight.size * (bytes_per_element - 1) - 4 * weight.shape[0] for weight in matrices)
    return sum(
        weight.size * bytes_per_element - weight.size // 2 - 4 * weight.size // INT4_GROUP
        for weight in matrices
        if weight.shape[1] % INT4_GROUP == 0
    )


@lru_cache(maxsize=64)
def int4_scratch_bytes(spec: ModelSpec, bytes_per_element: int) -> int:
    """Where the largest matrix of a layer is unpacked for steps of many tokens: gate and up lie together."""
    widest = max(
        (
            (2 if weight.name.endswith(("gate.weight", "up.weight")) else 1) * weight.size
            for layer, operation in model_operations(spec)
            for weight in operation.weights
            if layer is not None and len(weight.shape) == 2 and weight.name not in _NEVER_QUANTISED
            and weight.shape[1] % INT4_GROUP == 0
        ),
        default=0,
    )  # fmt: skip
    return widest * bytes_per_element


@lru_cache(maxsize=256)
def gpu_buffer_bytes(spec: ModelSpec, tokens: int, outputs: int, bytes_per_element: int) -> int:
    """What the GPU decoder works in: the stream and its normed copy, one layer's projections, attention's result,
    the feed-forward's two sides and their product, and the rows whose logits are wanted."""
    buffers: dict[str, int] = {}
    mixed = 0  # numbers that attention's last product takes
    for has_experts in {spec.is_moe_layer(layer) for layer in range(spec.layers)}:
        for operation in layer_operations(spec, has_experts, "serve"):
            # Layers run one after the other; shared experts work in the plain feed-forward's buffers.
            name = operation.name.replace(".shared.", ".")
            buffers[name] = max(buffers.get(name, 0), operation.buffer)
            if name == "attention.output" and operation.product is not None:
                mixed = operation.product.inputs
    per_token = 2 * spec.hidden + sum(buffers.values())
    routing = 0
    if spec.moe is not None:
        moe, choices = spec.moe, tokens * spec.moe.experts_per_token
        sorted_choices = choices + (moe.experts + 1) * 128  # every expert's begin at a tile of up to 128
        words = tokens * moe.experts + 2 * choices + moe.experts + sorted_choices + sorted_choices // 16 + 1
        routing = 4 * words
    return bytes_per_element * (tokens * per_token + outputs * (2 * spec.hidden + mixed)) + routing


def gpu_logit_bytes(vocabulary: int, draws: int, bytes_per_element: int) -> int:
    """Logits, and what sampling keeps: maximum, place, mass and count of every 4,096 tokens, the maximum of every
    64, the bits, weights and tokens of up to 4,096 candidates, and three numbers."""
    parts = -(-vocabulary // 4096)
    candidates = min(4096, 1 << (vocabulary - 1).bit_length())
    return draws * (vocabulary * bytes_per_element + parts * (16 + 4096 // 64 * 4) + 12 * candidates + 16)


def gpu_table_bytes(max_running: int, tokens: int, context: int, block_size: int) -> int:
    """Token ids, block tables and a step's copy of these, the words a plan travels in, three numbers a token."""
    blocks = -(-(context + 1) // block_size)
    words = 15 * max_running + 1
    return 4 * (max_running * (context + 1 + 2 * blocks + 1) + words + 3 * tokens)
