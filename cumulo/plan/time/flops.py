"""FLOPs of training, by the conventions the published tables use. The cost model counts one way; `published` needs
the others to turn a printed TFLOP/s or MFU back into seconds.
"""

from functools import lru_cache

from cumulo.plan.time.compute import attention_flops
from cumulo.spec.model import ModelSpec


@lru_cache(512)
def model_flops(model: ModelSpec, sequence: int, causal: bool = True, ahead: int = 0) -> float:
    """For one token, forward and backward: 6 for each weight it meets in a product, and attention, of which
    `causal` counts only the half that the mask leaves. `ahead`: further tokens that are predicted, each with a
    layer like the last, the loss again and a product that joins two streams."""
    last = model.layers - 1
    layers = (*range(model.layers), *[last] * ahead)
    attention = sum(attention_flops(model, 1, sequence, model.window_of_layer(index)) for index in layers)
    if not causal:
        attention *= 2 * sequence / (sequence + 1)
    joined = ahead * (layer_weights(model, last) + model.vocab_size * model.hidden + 2 * model.hidden**2)
    return 6 * (met_weights(model) + joined) + 3 * attention


@lru_cache(512)
def met_weights(model: ModelSpec) -> int:
    """Weights of matrix products that one token meets, the vocabulary's included."""
    layers = sum(layer_weights(model, index) for index in range(model.layers))
    return layers + model.vocab_size * model.hidden


def layer_weights(model: ModelSpec, index: int) -> int:
    """Those of one layer."""
    hidden = model.hidden
    if model.mla is None:
        attention = hidden * (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    else:
        mla = model.mla
        query = model.heads * (mla.nope_head_dim + mla.rope_head_dim)
        attention = query * hidden if mla.q_rank is None else mla.q_rank * (hidden + query)
        attention += hidden * (mla.kv_rank + mla.rope_head_dim)
        attention += mla.kv_rank * model.heads * (mla.nope_head_dim + mla.value_head_dim)
        attention += model.heads * mla.value_head_dim * hidden
    matrices = 3 if model.gated_ffn else 2
    if model.moe is None or not model.is_moe_layer(index):
        return attention + matrices * model.ffn_hidden * hidden
    width = model.moe.experts_per_token * model.moe.expert_hidden + model.moe.shared_hidden
    return attention + matrices * width * hidden + model.moe.experts * hidden


def megatron_flops(model: ModelSpec, tokens: float, sequence: int, full_recompute: bool) -> float:
    """Narayanan et al. 2021, equation 3 (full recomputation): 96·B·s·L·h²·(1 + s/6h + V/16Lh); Korthikanti et al.
    2022, equation 7: 72·B·s·L·h²·(1 + s/6h + V/12Lh). Both count attention without its mask."""
    h, layers, vocabulary = model.hidden, model.layers, model.vocab_size
    factor, share = (96, 16) if full_recompute else (72, 12)
    return factor * tokens * layers * h * h * (1 + sequence / (6 * h) + vocabulary / (share * layers * h))
