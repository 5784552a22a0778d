"""What the GPU decoder reads of a layer: its matrices, plain or quantised for the GPU, of the whole model or of one
rank's slice. `CudaDecoder` asks for it once per layer.

A slice (Shoeybi et al. 2019, section 3) has some of the heads and some of the feed-forward's width: the first
matrix of each half-layer is cut by rows, the second by columns. So what a half-layer adds to the stream is a
partial sum, and the ranks' sum is the whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.kernels.cuda.linear.fp8 import Fp8Weight
from cumulo.kernels.cuda.linear.linear import linear
from cumulo.kernels.cuda.linear.product import Weight
from cumulo.kernels.cuda.linear.w4_weight import STEP, W4Weight
from cumulo.models.attention import Attention, LatentAttention
from cumulo.models.decoder import Layer
from cumulo.models.linear import Linear
from cumulo.models.moe import FeedForward, MixtureOfExperts
from cumulo.models.play.cuda_latent import LatentWeights


@dataclass(slots=True)
class HeadWeights:
    """What attention of grouped heads reads before the output product."""

    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(slots=True)
class LayerWeights:
    """What a layer's products and norms read; a matrix may be plain or quantised for the GPU."""

    attention_norm: Tensor
    attention: HeadWeights | LatentWeights
    output: Weight
    output_bias: Tensor | None
    scale: float
    window: int | None
    ffn_norm: Tensor
    mixture: MixtureOfExperts | None
    gate_up: Weight | None  # of the plain feed-forward, or of the expert every token passes through
    gate_up_bias: Tensor | None
    down: Weight | None
    down_bias: Tensor | None
    ffn_width: int


def layer_weights(
    layer: torch.nn.Module,
    kind: str,
    adds_biases: bool,
    largest: Callable[[Tensor], Tensor] = lambda own: own,
) -> LayerWeights:
    """With `kind` fp8 or int4 the layer's matrices are quantised and the plain ones freed; routed experts stay as
    they are. Of the ranks whose partial sums are added up exactly one adds the biases of the sums. `largest`: over
    all ranks, of their rows' largest weights, so that a matrix they share has one rank's scales."""
    assert isinstance(layer, Layer)
    attention, ffn = layer.attention, layer.ffn

    def matrix(linear: Linear, shares_rows: bool = False) -> Weight:
        if kind == "auto" or (kind == "int4" and linear.shape[1] % STEP):
            return linear.weight
        weight: Fp8Weight | W4Weight
        if kind == "int4":
            weight = W4Weight.quantised(linear.weight)
        elif shares_rows:
            weight = Fp8Weight.quantised(linear.weight, largest=largest)
        else:
            weight = Fp8Weight.quantised(linear.weight)
        linear.pack(_PackedForGpu(weight))
        return weight

    plain = ffn if isinstance(ffn, FeedForward) else ffn.shared
    return LayerWeights(
        attention_norm=layer.attention_norm.weight,
        attention=_heads(attention, matrix)
        if isinstance(attention, Attention)
        else _latent(attention, matrix),
        output=matrix(attention.output, shares_rows=True),
        output_bias=attention.output.bias if adds_biases else None,
        scale=attention.scale,
        window=attention.window,
        ffn_norm=layer.ffn_norm.weight,
        mixture=ffn if isinstance(ffn, MixtureOfExperts) else None,
        gate_up=None if plain is None else matrix(plain.gate_up),
        gate_up_bias=None if plain is None else plain.gate_up.bias,
        down=None if plain is None else matrix(plain.down, shares_rows=True),
        down_bias=None if plain is None or not adds_biases else plain.down.bias,
        ffn_width=0 if plain is None else plain.down.shape[1],
    )


def _heads(attention: Attention, matrix: Callable[[Linear], Weight]) -> HeadWeights:
    normed = attention.qk_norm
    return HeadWeights(
        qkv=matrix(attention.qkv),
        qkv_bias=attention.qkv.bias,
        q_norm=attention.q_norm.weight if normed else None,
        k_norm=attention.k_norm.weight if normed else None,
    )


def _latent(attention: LatentAttention, matrix: Callable[[Linear], Weight]) -> LatentWeights:
    mla = attention.mla
    low = mla.q_rank is not None
    # kv_b is multiplied per head and transposed, which no quantised product does.
    expansion = attention.kv_b.weight.view(attention.heads, -1, mla.kv_rank)
    return LatentWeights(
        q_a=matrix(attention.q_a) if low else None,
        q_a_bias=attention.q_a.bias if low else None,
        q_a_norm=attention.q_a_norm.weight if low else None,
        q=matrix(attention.q_b if low else attention.q),
        kv_a=matrix(attention.kv_a),
        kv_a_bias=attention.kv_a.bias,
        kv_a_norm=attention.kv_a_norm.weight,
        into_latent=expansion[:, : mla.nope_head_dim],
        out_of_latent=expansion[:, mla.nope_head_dim :],
    )


class _PackedForGpu:
    """A GPU's quantised matrix in the place of a plain one in the torch decoder, which can still be asked for
    both."""

    def __init__(self, weight: Fp8Weight | W4Weight) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight.dequantised()[indices]
