"""What one step of a model must move and compute on one device: bytes and FLOPs by part. Read by `step_cost`.

Tensor and expert parallelism are arithmetic on the model: a rank holds 1/tp of every matrix and of the heads, and
1/ep of the experts, so its work is that of a smaller model. What ranks say to each other is counted apart.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from cumulo.errors import ConfigError
from cumulo.layout.layout import nearest_divisor
from cumulo.spec.counting import BITS_PER_WEIGHT
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import Share, model_operations

BITS_OF_KV = {"float32": 32, "float16": 16, "bfloat16": 16, "float8": 8}


@dataclass(frozen=True, slots=True)
class Format:
    """How a deployment keeps its numbers."""

    weights: str = "bfloat16"  # of the layers' matrices
    experts: str = "bfloat16"  # of routed experts, which the engine leaves unquantised
    head: str = "bfloat16"  # of the embedding and the output matrix, which are usually left unquantised
    kv: str = "bfloat16"
    compute: str = "bfloat16"  # of the matrix products
    activations: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("weights", "experts", "head", "kv"):
            known = list(BITS_OF_KV if name == "kv" else BITS_PER_WEIGHT)
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} can be kept as {', '.join(known)}; got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class StepWork:
    """Per rank. Matrices are counted once over all layers."""

    layers: int
    moe_layers: int
    dense_parameters: int  # of matrices that every token meets: attention, feed-forward, shared experts
    expert_parameters: int  # of one routed expert, over all layers that have some
    experts: int  # on this rank; where ranks cannot have equally many, some are on several
    expert_share: float  # of all tokens' experts that this rank computes
    experts_of_model: int
    experts_per_token: int
    expert_groups: int  # of experts, that a token's may be in
    head_parameters: int  # of the output matrix
    held_bytes: int  # of everything this rank keeps
    weight_bytes: float  # of one parameter of the layers' plain matrices
    expert_bytes: float  # of one parameter of an expert
    head_bytes: float  # of one parameter of the output matrix
    kv_bytes_per_token: float
    attention_flops_per_pair: int  # of a prompt's query with one key, over all layers
    # ... of a decoding query: latent attention's heads meet the latent itself (DeepSeek-AI 2024a, section 2.1)
    decode_flops_per_pair: int
    elementwise_bytes_per_token: float  # moved between the products: norms, rotation, activation
    logit_bytes: float  # of one draw's logits
    message_bytes: float  # a token's hidden state
    window: int | None  # where all layers look back only so far
    part_window: int | None  # where some do,
    windowed: float  # and which share of them

    def experts_hit(self, tokens: int) -> float:
        """Experts of this rank that some of so many tokens are sent to, if routing is even."""
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts_of_model) ** tokens)


@lru_cache(maxsize=512)
def step_work(spec: ModelSpec, form: Format, tp: int = 1, ep: int = 1) -> StepWork:
    """The work of one of tp ranks; its experts are spread over ep of the replica's ranks."""
    check_split(spec, tp, ep)
    held, dense, experts = 0.0, 0, 0
    bits, expert_bits, head_bits = (BITS_PER_WEIGHT[kind] for kind in (form.weights, form.experts, form.head))
    attention_flops, elementwise, moe = 0, 0.0, spec.moe
    for layer, operation in model_operations(spec, "serve"):
        for weight in operation.weights:
            if weight.cut == "expert":
                experts += weight.size
                held += (
                    weight.size
                    * (1 / tp if moe is None or ep == 1 else -(-moe.experts // ep) / moe.experts)
                    * expert_bits
                    / 8
                )
            elif len(weight.shape) < 2 or operation.family == "routing":
                held += weight.size * 2
            elif operation.family in ("embedding", "loss"):
                held += weight.size / tp * head_bits / 8
            else:
                dense += weight.size
                held += weight.size / tp * bits / 8
        if operation.scores:
            attention_flops += operation.scores.flops_per_pair // tp
        if layer is not None:
            elementwise += operation.moved / Share(tp).ranks(operation.cut)
    moe_layers = sum(spec.is_moe_layer(layer) for layer in range(spec.layers))
    kv_heads = max(1, spec.kv_cache_heads // tp)  # fewer heads than ranks: some hold the same
    some = spec.windowed_layers or ()
    number_bytes = BITS_OF_KV.get(form.activations, 16) / 8
    return StepWork(
        layers=spec.layers,
        moe_layers=moe_layers,
        dense_parameters=dense // tp,
        expert_parameters=0 if moe is None else experts // moe.experts // (1 if ep > 1 else tp),
        experts=0 if moe is None else -(-moe.experts // ep),
        expert_share=1 / ep,
        experts_of_model=0 if moe is None else moe.experts,
        experts_per_token=0 if moe is None else moe.experts_per_token,
        expert_groups=0 if moe is None else moe.top_groups if moe.groups > 1 else moe.experts_per_token,
        head_parameters=spec.vocab_size * spec.hidden // tp,
        held_bytes=math.ceil(held),
        weight_bytes=bits / 8,
        expert_bytes=expert_bits / 8,
        head_bytes=head_bits / 8,
        kv_bytes_per_token=spec.layers
        * kv_heads
        * (spec.kv_key_dim + spec.kv_value_dim)
        * BITS_OF_KV[form.kv]
        / 8,
        attention_flops_per_pair=attention_flops,
        decode_flops_per_pair=attention_flops,
        elementwise_bytes_per_token=number_bytes * elementwise,
        logit_bytes=number_bytes * spec.vocab_size / tp,
        message_bytes=number_bytes * spec.hidden,
        window=None if some else spec.sliding_window,
        part_window=spec.sliding_window if some else None,
        windowed=len(some) / spec.layers,
    )


def check_split(spec: ModelSpec, tp: int, ep: int) -> None:
    if tp < 1 or spec.heads % tp:
        near = nearest_divisor(spec.heads, tp)
        raise ConfigError(f"tp {tp} does not divide the model's {spec.heads} heads; {near} would")
    if spec.moe is None and ep != 1:
        raise ConfigError(f"ep {ep}: the model has no experts to spread; leave ep out")
    if ep < 1 or (spec.moe is not None and (ep > spec.moe.experts or (ep <= tp and spec.moe.experts % ep))):
        raise ConfigError(
            f"ep {ep}: {spec.moe.experts if spec.moe else 0} experts cannot be spread evenly over {ep} ranks"
        )
