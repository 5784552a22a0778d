"""Attention inside packed documents, differentiable. Used by the layers of `TrainingDecoder`.

On a GPU documents are packed for our flash kernel, or rows for the fastest one; elsewhere, and for windows and
latent attention, torch's own attention gets a mask.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.models.attention import Attention, LatentAttention
from cumulo.models.rope import Rotation
from cumulo.train.loader import DeviceBatch


class DocumentMask:
    """Who may see whom in a batch: a token its own document's earlier tokens, and itself."""

    def __init__(self, positions: Tensor, starts: Tensor, one_per_row: bool) -> None:
        self.rows, self.length = positions.shape
        self.positions, self.starts, self.one_per_row = positions, starts, one_per_row
        self._masks: dict[int | None, Tensor] = {}

    @classmethod
    def of(cls, batch: DeviceBatch) -> "DocumentMask":
        return cls(batch.positions, batch.document_starts, batch.documents == len(batch.tokens))

    def visible(self, window: int | None) -> Tensor:
        """[B, 1, S, S], true where the query (third) sees the key (last); made once per batch and window."""
        if window not in self._masks:
            document = (self.positions == 0).cumsum(1)
            place = torch.arange(self.length, device=self.positions.device)
            distance = place[:, None] - place
            near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            self._masks[window] = ((document[:, :, None] == document[:, None]) & near)[:, None]
        return self._masks[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query [T, H, D], key [T, KV, D], value [T, KV, E] -> [T, H, E]."""
        plain = window is None or window >= self.length
        if query.is_cuda and plain and key.shape == value.shape:
            # Imported here: without a GPU there need be no Triton.
            from cumulo.kernels.cuda.flash_attention import flash_attention, packed_attention

            if not self.one_per_row:
                return packed_attention(query, key, value, self.starts, scale=scale)[0]
            return flash_attention(*map(self._in_rows, (query, key, value)), scale=scale).flatten(0, 1)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        q, k, v = (self._in_rows(states).transpose(1, 2) for states in (query, key, value))
        if plain and self.one_per_row:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            visible = self.visible(None if plain else window)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        return mixed.transpose(1, 2).flatten(0, 1)

    def _in_rows(self, states: Tensor) -> Tensor:
        return states.view(self.rows, self.length, *states.shape[1:])


class TrainingAttention(Attention):
    """The parameters of `Attention`, without its cache."""

    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor, rotation: Rotation, documents: DocumentMask) -> Tensor:  # type: ignore[override]
        states = self.qkv(x).view(len(x), -1, self.head_dim)
        query, key, value = states.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotation.apply(query), rotation.apply(key)
        mixed = documents.attend(query, key, value, self.scale, self.window)
        return self.output(mixed.flatten(1))


class TrainingLatentAttention(LatentAttention):
    """The parameters of `LatentAttention`; keys and values are expanded per head, which is less work when all
    tokens are queries (DeepSeek-V2, section 2.1)."""

    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor, rotation: Rotation, documents: DocumentMask) -> Tensor:  # type: ignore[override]
        mla, tokens = self.mla, len(x)
        projected = self.q(x) if mla.q_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        nope, rope = projected.view(tokens, self.heads, -1).split((mla.nope_head_dim, mla.rope_head_dim), -1)
        latent, shared = self.kv_a(x).split((mla.kv_rank, mla.rope_head_dim), -1)
        expanded = self.kv_b(self.kv_a_norm(latent)).view(tokens, self.heads, -1)
        key_nope, value = expanded.split((mla.nope_head_dim, mla.value_head_dim), -1)
        turned = rotation.apply(shared.contiguous()[:, None]).expand(-1, self.heads, -1)
        query = torch.cat((nope, rotation.apply(rope.contiguous())), -1)
        mixed = documents.attend(query, torch.cat((key_nope, turned), -1), value, self.scale, self.window)
        return self.output(mixed.flatten(1))
