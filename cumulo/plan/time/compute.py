"""Seconds of arithmetic and memory traffic: one layer, the embedding and the loss, under a profile.
`chunks` adds communication and puts them together.

Every operation is a roofline. A product of [m, k] and [k, n] takes

    2·m·n·k / (peak · matmul_efficiency)  +  matmul_traffic · bytes·(m·k + k·n + m·n) / bandwidth

so that its efficiency falls as its arithmetic intensity 1/(1/m + 1/n + 1/k) does. What lies between the
products is counted by the bytes that ideal fusion would move, times `elementwise_passes`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cumulo.plan.time.compute_profile import Profile
from cumulo.spec.device import Device
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.spec.operations import (
    MatrixProduct,
    Share,
    first_operations,
    last_operations,
    layer_operations,
    layer_scores,
    weights_met,
)

# Flash attention's backward computes the scores again and four more products: 2.5 times the forward (Dao 2023).
BACKWARD_ATTENTION = 2.5
_REFERENCE_HEAD = 128  # the width of a head for which attention efficiencies are stated


class Seconds(NamedTuple):
    """Where one rank's time goes in one pass of one micro-batch."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    tensor: float = 0.0  # waiting for tensor-parallel ranks
    context: float = 0.0  # ... for context-parallel ranks
    expert: float = 0.0  # ... for expert-parallel ranks

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def computed(self) -> float:
        """Without launches and without what is waited for."""
        return self.matmul + self.attention + self.elementwise


def add(*parts: Seconds) -> Seconds:
    """No part: a chunk may be without layers where stages are evened out."""
    if len(parts) < 2:
        return parts[0] if parts else Seconds()
    return Seconds(*map(sum, zip(*parts, strict=True)))


def scale(part: Seconds, factor: float) -> Seconds:
    return Seconds(*(value * factor for value in part))


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of one micro-batch through a layer or a chunk of them."""

    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward_input.total + self.backward_weight.total


@dataclass(frozen=True, slots=True)
class Rates:
    """A profile on a device: seconds for each unit of work."""

    matmul_flop_s: float
    matmul_byte_s: float
    attention_flop_s: float  # forward, heads of 128
    attention_backward_flop_s: float
    elementwise_byte_s: float  # of ideally fused traffic
    byte_s: float  # of plain traffic
    number_bytes: int  # of an activation


@lru_cache(256)
def rates(profile: Profile, device: Device) -> Rates:
    wide = profile.dtype if profile.dtype != "float8" else "bfloat16"  # attention stays in 16 bits
    peak, wide_peak = device.flops(profile.dtype), device.flops(wide)
    byte_s = 1 / device.memory_bytes_per_s
    return Rates(
        matmul_flop_s=1 / (peak * profile.matmul_efficiency),
        matmul_byte_s=profile.matmul_traffic * byte_s,
        attention_flop_s=1 / (wide_peak * profile.attention_forward_efficiency),
        attention_backward_flop_s=1 / (wide_peak * profile.attention_backward_efficiency),
        elementwise_byte_s=profile.elementwise_passes * byte_s,
        byte_s=byte_s,
        number_bytes=4 if profile.dtype == "float32" else 2,
    )


def product_s(rate: Rates, m: float, n: float, k: float, count: float = 1.0) -> float:
    """`count` products of [m, k] and [k, n]."""
    traffic = rate.number_bytes * (m * k + k * n + m * n)
    return count * (2 * m * n * k * rate.matmul_flop_s + traffic * rate.matmul_byte_s)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What a rank computes of one layer, whatever the pass."""

    tokens: int  # of the micro-batch on this rank, over all tensor-parallel ranks together
    sequence: int  # keys a query may see at most: the whole sequence, over all context-parallel ranks
    tensor: int = 1  # tensor-parallel ranks
    sequence_parallel: bool = False  # they share the tokens between the products
    expert_ranks: int = 1
    whole_experts: bool = False  # tensor-parallel ranks hold different experts, and not slices of each
    window: int | None = None
    flash: bool = True
    host_waits: bool = False  # for how many tokens each expert gets

    @property
    def share(self) -> Share:
        return Share(self.tensor, self.tensor if self.sequence_parallel else 1, self.expert_ranks)


@lru_cache(4096)
def layer(
    model: ModelSpec, moe: bool, work: LayerWork, profile: Profile, device: Device, block: str = ""
) -> Passes:
    """One layer's forward and backward, without communication and recomputation. `block`: only of the operations
    whose names begin so, attention or ffn."""
    rate = rates(profile, device)
    operations = [found for found in layer_operations(model, moe) if found.name.startswith(block)]
    products = sum(
        _product_s(operation.product, work, rate, profile) for operation in operations if operation.product
    )
    elementwise_s = between_s(model, moe, work, profile, device, block)
    host_s = 0.0
    if moe and model.moe is not None and block != "attention":
        elementwise_s += _copies_s(model, model.moe, work, profile, rate)
        held = model.moe.experts / work.expert_ranks / (work.tensor if work.whole_experts else 1)
        host_s = profile.expert_launch_s * held if work.host_waits else 0.0
    scores = (0.0, 0.0) if block == "ffn" else _attention_s(model, work, rate, profile)
    forward_attention_s, backward_attention_s = scores
    forward = Seconds(products, forward_attention_s, elementwise_s, profile.launch_s)
    inputs = Seconds(products, backward_attention_s, 2 * elementwise_s, profile.launch_s)
    weights = Seconds(matmul=products, launch=profile.launch_s)
    # The device waits for a host that is slower than itself; backward is launched as one.
    forward_wait_s = max(0.0, host_s - forward.total)
    backward_wait_s = max(0.0, 2 * host_s - inputs.total - weights.total)
    return Passes(
        forward._replace(launch=forward.launch + forward_wait_s),
        inputs._replace(launch=inputs.launch + backward_wait_s),
        weights,
    )


@lru_cache(1024)
def embedding(model: ModelSpec, tokens: int, profile: Profile, device: Device) -> Passes:
    """Rows read and written; backward adds them to the table's gradient."""
    rate = rates(profile, device)
    moved = sum(operation.moved for operation in first_operations(model))
    moved_s = tokens * moved * rate.number_bytes * rate.elementwise_byte_s
    return Passes(
        Seconds(elementwise=moved_s, launch=profile.launch_s),
        Seconds(),
        Seconds(elementwise=2 * moved_s, launch=profile.launch_s),
    )


@lru_cache(1024)
def head(
    model: ModelSpec, vocabulary: int, tokens: int, tensor: int, profile: Profile, device: Device
) -> Passes:
    """The last norm, the vocabulary's product and the loss. Its product is 16-bit even where layers use 8."""
    narrow = profile.dtype == "float8"
    rate = rates(profile, device)
    factor = device.flops("float8") / device.flops("bfloat16") if narrow else 1.0
    product = product_s(rate, tokens, vocabulary / tensor, model.hidden) * factor
    logits_s = tokens * vocabulary / tensor * profile.logit_bytes * rate.byte_s
    moved = sum(operation.moved for operation in last_operations(model))
    norm_s = tokens * moved * rate.number_bytes * rate.elementwise_byte_s
    return Passes(
        Seconds(product, 0.0, logits_s / 2 + norm_s, profile.launch_s),
        Seconds(product, 0.0, logits_s / 2 + 2 * norm_s, profile.launch_s),
        Seconds(product, 0.0, 0.0, profile.launch_s),
    )


def visible_keys(sequence: int, window: int | None) -> float:
    """Keys a query sees on average under the causal mask: (s + 1)/2, or what a window leaves of it."""
    if window is None or window >= sequence:
        return (sequence + 1) / 2
    return window - window * (window - 1) / (2 * sequence)


def attention_flops(model: ModelSpec, tokens: float, sequence: int, window: int | None) -> float:
    """Forward, of one layer: scores, and their product with the values, over the causal half."""
    pairs = tokens * visible_keys(sequence, window)
    return sum(scores.flops_per_pair * pairs for scores in layer_scores(model))


def _attention_s(model: ModelSpec, work: LayerWork, rate: Rates, profile: Profile) -> tuple[float, float]:
    pairs = work.tokens * visible_keys(work.sequence, work.window) / work.tensor
    half, forward_s, backward_s = profile.attention_half_width, 0.0, 0.0
    for scores in layer_scores(model):
        flops = scores.flops_per_pair * pairs
        narrow = (1 + half / scores.key_width) / (1 + half / _REFERENCE_HEAD)
        forward_s += flops * narrow * rate.attention_flop_s
        backward_s += BACKWARD_ATTENTION * flops * narrow * rate.attention_backward_flop_s
        if not work.flash:  # scores are written and read, masked half included
            stored = work.tokens * work.sequence * scores.heads / work.tensor * profile.score_bytes
            forward_s, backward_s = forward_s + stored * rate.byte_s, backward_s + 2 * stored * rate.byte_s
    return forward_s, backward_s


def _product_s(product: MatrixProduct, work: LayerWork, rate: Rates, profile: Profile) -> float:
    outputs = product.outputs / work.tensor if product.sliced == "outputs" else product.outputs
    inputs = product.inputs / work.tensor if product.sliced == "inputs" else product.inputs
    if product.experts == 1:
        return product_s(rate, work.tokens, outputs, inputs)
    # Each rank holds experts/ep experts, and gets as many token copies as it sends out, if routing is even.
    held = product.experts / work.expert_ranks
    copies = work.tokens * product.choices * profile.expert_imbalance
    if work.whole_experts:
        held, copies = held / work.tensor, copies / work.tensor
        outputs, inputs = product.outputs, product.inputs
    return product_s(rate, copies / held, outputs, inputs, held)


def between_s(
    model: ModelSpec, moe: bool, work: LayerWork, profile: Profile, device: Device, block: str = ""
) -> float:
    """Of a layer's forward, what lies between its products, without the exchange of tokens."""
    rate = rates(profile, device)
    moved = sum(moved_numbers(model, moe, work.share, block).values())
    return work.tokens * rate.number_bytes * moved * rate.elementwise_byte_s


@lru_cache(4096)
def moved_numbers(model: ModelSpec, moe: bool, share: Share, block: str = "") -> dict[str | None, float]:
    """Of one token in forward on one rank, by what computes it again."""
    moved: dict[str | None, float] = {}
    for operation in (found for found in layer_operations(model, moe) if found.name.startswith(block)):
        numbers = operation.moved / share.ranks(operation.cut)
        moved[operation.again] = moved.get(operation.again, 0.0) + numbers
    return moved


def _copies_s(model: ModelSpec, moe: MoESpec, work: LayerWork, profile: Profile, rate: Rates) -> float:
    """A token's copies sorted, quantised, brought back and added up; biases added where nothing fuses them."""
    border = model.hidden / (work.tensor if work.sequence_parallel else 1)
    numbers = profile.expert_passes * border
    if model.mlp_bias:
        inside = (3 if model.gated_ffn else 2) * moe.expert_hidden / work.tensor
        numbers += profile.expert_bias_passes * (border + inside)
    return work.tokens * moe.experts_per_token * numbers * rate.number_bytes * rate.byte_s


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
