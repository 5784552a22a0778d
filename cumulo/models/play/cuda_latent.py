"""Latent attention (MLA) of the GPU decoder: weights, buffers, and the half-layer up to the output product.
`CudaDecoder` makes one for models that have it.

As in `models/attention.py` queries move into the latent space (DeepSeek-V2, 2024, section 2.1.2), where all heads
attend to one key; here every step goes into a buffer that never moves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.kernels.cuda.attention.mla_cache import mla_cache
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.linear.invariant_matmul import invariant_matmul
from cumulo.kernels.cuda.linear.linear import linear
from cumulo.kernels.cuda.linear.product import Weight
from cumulo.spec.model import MLASpec, ModelSpec


@dataclass(slots=True)
class LatentWeights:
    """What latent attention reads before the output product."""

    q_a: Weight | None  # into the queries' own latent, where the model has one
    q_a_bias: Tensor | None
    q_a_norm: Tensor | None
    q: Weight  # to every head's query, from that latent or from the stream
    kv_a: Weight
    kv_a_bias: Tensor | None
    kv_a_norm: Tensor
    into_latent: Tensor  # [heads, nope, rank]
    out_of_latent: Tensor  # [heads, value, rank]


class LatentHalf:
    """The buffers of latent attention for up to `max_tokens` tokens, and one layer's way through them."""

    def __init__(
        self,
        spec: ModelSpec,
        mla: MLASpec,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        invariant: bool,
    ) -> None:
        self.spec, self.mla, self.invariant = spec, mla, invariant

        def buffer(*columns: int) -> Tensor:
            return torch.empty((max_tokens, *columns), dtype=dtype, device=device)

        self.low_query = buffer(mla.q_rank or 0)
        self.projected = buffer(spec.heads, mla.nope_head_dim + mla.rope_head_dim)
        self.compressed = buffer(mla.kv_rank + mla.rope_head_dim)
        self.query = buffer(spec.heads, mla.kv_rank + mla.rope_head_dim)
        self.latent = buffer(spec.heads, mla.kv_rank)

    @property
    def nbytes(self) -> int:
        own = (self.low_query, self.projected, self.compressed, self.query, self.latent)
        return sum(tensor.nbytes for tensor in own)

    def attend(
        self,
        weights: LatentWeights,
        normed: Tensor,
        keys: Tensor,
        rotation: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> Tensor:
        """From the normed stream [T, hidden] to every head's result [T, heads · value]; the key is written."""
        tokens, mla = len(normed), self.mla
        projected, query, latent = self.projected[:tokens], self.query[:tokens], self.latent[:tokens]
        compressed = self._product(normed, weights.kv_a, self.compressed[:tokens], weights.kv_a_bias)
        source = normed
        if weights.q_a is not None:
            assert weights.q_a_norm is not None
            source = self._product(normed, weights.q_a, self.low_query[:tokens], weights.q_a_bias)
            rms_norm(source, weights.q_a_norm, mla.norm_eps, out=source)
        self._product(source, weights.q, projected.view(tokens, -1))
        mla_cache(
            projected, compressed, weights.kv_a_norm, *rotation, positions, slots, query, keys, mla.norm_eps,
            self.spec.rope_interleaved,
        )  # fmt: skip
        absorbed = query[..., : mla.kv_rank]
        self._by_head(projected[..., : mla.nope_head_dim], weights.into_latent, absorbed)
        plan.attend(query, keys, keys, latent, scale, window)
        self._by_head(latent, weights.out_of_latent.transpose(1, 2), out.view(tokens, -1, mla.value_head_dim))
        return out

    def _product(self, x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, out=out, bias=bias, invariant=self.invariant)

    def _by_head(self, x: Tensor, matrices: Tensor, out: Tensor) -> None:
        """x [T, heads, K] times each head's own matrix [heads, K, N] into out [T, heads, N]."""
        if not self.invariant:
            torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
            return
        for head, matrix in enumerate(matrices):  # the library's choice depends on the number of rows
            invariant_matmul(x[:, head], matrix.t(), out[:, head])
