"""Attention inside packed documents: what a layer asks of a batch, and who answers when all its tokens are here.

On a GPU documents are packed for our flash kernel, or rows for the fastest one; elsewhere, and for windows and
latent attention, torch's own attention gets a mask.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.train.data.packing import DeviceBatch


class Documents(Protocol):
    """Attention among the tokens of a batch, of which this rank has some."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query [T, H, D], key [T, KV, D], value [T, KV, E] of this rank's tokens -> [T, H, E]."""
        ...


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The places of a batch that this rank computes, row after row: T in all."""

    tokens: Tensor  # [T]
    targets: Tensor  # [T]
    positions: Tensor  # [T], in their documents
    documents: Documents


class DocumentMask:
    """Who may see whom in a batch: a token its own document's earlier tokens, and itself."""

    def __init__(self, positions: Tensor, starts: Tensor, one_per_row: bool) -> None:
        self.rows, self.length = positions.shape
        self.positions, self.starts, self.one_per_row = positions, starts, one_per_row
        self._masks: dict[int | None, Tensor] = {}

    @classmethod
    def from_batch(cls, batch: DeviceBatch) -> "DocumentMask":
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
            from cumulo.kernels.cuda.attention.flash_attention import flash_attention, packed_attention

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


class WholeSequences:
    """All places of every row are on this rank."""

    def own_tokens(self, batch: DeviceBatch) -> OwnTokens:
        """This rank's places of every row."""
        return OwnTokens(
            batch.tokens.flatten(),
            batch.targets.flatten(),
            batch.positions.flatten(),
            DocumentMask.from_batch(batch),
        )

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks that have other places of the same rows, without gradients."""
        return values
