"""Attention over the paged KV cache: grouped heads, or one latent per token (MLA). Used by decoder layers.

Both write this step's keys first and then attend through the block tables, so a token sees its own sequence's
earlier chunks, its prefix hits and its step-mates by one rule.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cumulo.kernels.cpu.paged_attention import paged_attention
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.linear import Linear, RMSNorm, TensorKind
from cumulo.models.rope import Rotation, yarn_magnitude
from cumulo.spec.model import MLASpec, ModelSpec


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with one fused projection for query, key and value."""

    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, layer: int, *, kind: TensorKind) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.window = spec.window_of_layer(layer)
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv = Linear(spec.hidden, rows, spec.qkv_bias, kind=kind)
        self.qk_norm = spec.qk_norm
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, kind=kind)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, kind=kind)
        self.output = Linear(spec.heads * spec.head_dim, spec.hidden, spec.output_bias, kind=kind)

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of each token, [T, heads or kv_heads, head_dim], the first two rotated."""
        states = self.qkv(x).view(len(x), -1, self.head_dim)  # [T, heads + 2 kv_heads, head_dim]
        rotated = self.heads + self.kv_heads
        if self.qk_norm:
            query = rotation.apply(self.q_norm(states[:, : self.heads]))
            key = rotation.apply(self.k_norm(states[:, self.heads : rotated]))
        else:
            turned = rotation.apply(states[:, :rotated])
            query, key = turned[:, : self.heads], turned[:, self.heads :]
        return query, key, states[:, rotated:]

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch, cache: KVCache) -> Tensor:
        query, key, value = self.project(x, rotation)
        cache.write(self.layer, batch.slots, key, value)
        mixed = paged_attention(
            query, cache.keys[self.layer], cache.values[self.layer], batch, self.scale, self.window
        )
        return self.output(mixed.flatten(1))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024) in the absorbed form.

    A head's score is q·(W_uk c) = (W_ukᵀ q)·c for the cached latent c, so the query moves into the latent
    space and all heads attend to one shared key [c, rotated part], whose first part is also the value; the
    result leaves the latent space through W_uv. Keys and values are never expanded per head.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, mla: MLASpec, layer: int, *, kind: TensorKind) -> None:
        super().__init__()
        self.layer, self.heads, self.mla = layer, spec.heads, mla
        self.window = spec.window_of_layer(layer)
        self.scale = (mla.nope_head_dim + mla.rope_head_dim) ** -0.5
        if spec.rope_scaling is not None and spec.rope_scaling.mscale_all_dim:
            # yarn's temperature on the part that is not rotated too (DeepSeek-V2, section 2.1.4)
            self.scale *= yarn_magnitude(spec.rope_scaling.factor, spec.rope_scaling.mscale_all_dim) ** 2
        query_rows = spec.heads * (mla.nope_head_dim + mla.rope_head_dim)
        if mla.q_rank is None:
            self.q = Linear(spec.hidden, query_rows, kind=kind)
        else:
            self.q_a = Linear(spec.hidden, mla.q_rank, spec.qkv_bias, kind=kind)
            self.q_a_norm = RMSNorm(mla.q_rank, mla.norm_eps, kind=kind)
            self.q_b = Linear(mla.q_rank, query_rows, kind=kind)
        self.kv_a = Linear(spec.hidden, mla.kv_rank + mla.rope_head_dim, spec.qkv_bias, kind=kind)
        self.kv_a_norm = RMSNorm(mla.kv_rank, mla.norm_eps, kind=kind)
        # Absorbing needs the matrix itself, transposed and per head: it is never packed.
        self.kv_b = Linear(mla.kv_rank, spec.heads * (mla.nope_head_dim + mla.value_head_dim), kind=kind)
        self.output = Linear(spec.heads * mla.value_head_dim, spec.hidden, spec.output_bias, kind=kind)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch, cache: KVCache) -> Tensor:
        mla = self.mla
        projected = self.q(x) if mla.q_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        states = projected.view(len(x), self.heads, -1)
        query_nope, query_rope = states[..., : mla.nope_head_dim], states[..., mla.nope_head_dim :]
        compressed = self.kv_a(x)[:, None]  # [T, 1, rank + rope]: one head for all
        key = torch.cat(
            (
                self.kv_a_norm(compressed[..., : mla.kv_rank]),
                rotation.apply(compressed[..., mla.kv_rank :]),
            ),
            -1,
        )
        cache.write(self.layer, batch.slots, key, None)

        expansion = self.kv_b.weight.view(self.heads, -1, mla.kv_rank)
        into_latent = expansion[:, : mla.nope_head_dim]  # [heads, nope, rank]
        out_of_latent = expansion[:, mla.nope_head_dim :]  # [heads, value, rank]
        absorbed = torch.bmm(query_nope.transpose(0, 1), into_latent).transpose(0, 1)
        query = torch.cat((absorbed, rotation.apply(query_rope)), -1)
        mixed = paged_attention(
            query, cache.keys[self.layer], cache.values[self.layer], batch, self.scale, self.window
        )  # [T, heads, rank]
        values = torch.bmm(mixed.transpose(0, 1), out_of_latent.transpose(1, 2)).transpose(0, 1)
        return self.output(values.flatten(1))
