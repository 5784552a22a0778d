"""FLOPs of training, by the conventions the published tables use. The cost model counts one way; `published` needs
the others to turn a printed TFLOP/s or MFU back into seconds.
"""

from functools import lru_cache

from cumulo.plan.time.compute import attention_flops
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import weights_met


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
    joined = ahead * (
        weights_met(model, model.is_moe_layer(last)) + model.vocab_size * model.hidden + 2 * model.hidden**2
    )
    return 6 * (met_weights(model) + joined) + 3 * attention


@lru_cache(512)
def met_weights(model: ModelSpec) -> int:
    """Weights of matrix products that one token meets, the vocabulary's included."""
    layers = sum(weights_met(model, model.is_moe_layer(index)) for index in range(model.layers))
    return layers + model.vocab_size * model.hidden


def megatron_flops(model: ModelSpec, tokens: float, sequence: int, full_recompute: bool) -> float:
    """Narayanan et al. 2021, equation 3 (full recomputation): 96·B·s·L·h²·(1 + s/6h + V/16Lh); Korthikanti et al.
    2022, equation 7: 72·B·s·L·h²·(1 + s/6h + V/12Lh). Both count attention without its mask."""
    h, layers, vocabulary = model.hidden, model.layers, model.vocab_size
    factor, share = (96, 16) if full_recompute else (72, 12)
    return factor * tokens * layers * h * h * (1 + sequence / (6 * h) + vocabulary / (share * layers * h))
