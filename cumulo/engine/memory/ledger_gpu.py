"""What the GPU's decoder, sampler and weights will hold, to the byte, from the spec alone. The memory ledger's GPU
rows, and the assembly before it plans.
"""

import math

from cumulo.spec.model import ModelSpec
from cumulo.spec.parameters import parameter_shapes

# Multiplied otherwise than by the 8-bit products: the router in float32, kv_b per head.
_NEVER_FP8 = ("ffn.router.weight", "attention.kv_b.weight")


def fp8_saved_bytes(spec: ModelSpec, bytes_per_element: int) -> int:
    """What weights=fp8 frees: the layers' matrices shrink to a byte a number and four for each row's scale.
    Embedding, head and routed experts stay as they are."""
    quantised = (
        shape
        for name, shape in parameter_shapes(spec).items()
        if name.startswith("layers.") and len(shape) == 2 and not name.endswith(_NEVER_FP8)
    )
    return sum(math.prod(shape) * (bytes_per_element - 1) - 4 * shape[0] for shape in quantised)


def gpu_buffer_bytes(spec: ModelSpec, tokens: int, outputs: int, bytes_per_element: int) -> int:
    """What the GPU decoder works in: the stream and its normed copy, one layer's projections, attention's result,
    the feed-forward's two sides and their product, and the rows whose logits are wanted."""
    mla = spec.mla
    mixed = spec.heads * (mla.value_head_dim if mla is not None else spec.head_dim)
    dense = spec.ffn_hidden if spec.moe is None or spec.moe.dense_layers else 0
    width = max(dense, spec.moe.shared_hidden if spec.moe is not None else 0)
    per_token = 2 * spec.hidden + mixed + 3 * width
    if mla is None:
        per_token += (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    else:  # queries as projected and in the latent space, the result there, the latents themselves
        by_head = mla.nope_head_dim + mla.rope_head_dim + spec.kv_key_dim + mla.kv_rank
        per_token += spec.heads * by_head + spec.kv_key_dim + (mla.q_rank or 0)
    routing = 0
    if spec.moe is not None:
        moe, choices = spec.moe, tokens * spec.moe.experts_per_token
        per_token += moe.experts_per_token * (spec.hidden + moe.expert_hidden)
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
