"""Context parallelism: sequences cut over ranks. The sequence side of a `Split`.

Groups of `ulysses` ranks exchange tokens for heads, so that each has all of the group's tokens and some of the
heads (DeepSpeed-Ulysses, Jacobs et al. 2023); the groups pass keys and values round a ring (`ring_attention`).
Either may be one. A row is cut into 2 · ring chunks; the i-th group has chunk i and chunk 2 · ring - 1 - i, and of
each of them a rank has the part of its number in the group.
"""

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.ranks.collectives import Ring, all_reduce
from cumulo.ranks.differentiable import exchanged
from cumulo.ranks.groups import Group
from cumulo.ranks.ring_attention import AttentionBlock, MaskedBlock, PackedBlock, ring_attention
from cumulo.train.data.packing import DeviceBatch
from cumulo.train.model.document_mask import OwnTokens, WholeSequences


class ContextParallel(WholeSequences):
    def __init__(self, group: Group, ring: Group | None, ulysses: Group | None) -> None:
        self.group, self.ring, self.ulysses = group, Ring(ring), ulysses

    def own_tokens(self, batch: DeviceBatch) -> OwnTokens:
        place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        parts = 1 if self.ulysses is None else self.ulysses.size()
        index = 0 if self.ulysses is None else self.ulysses.rank()
        own = own_places(place, self.ring.size, self.ring.index).view(2, parts, -1)[:, index].flatten()
        return OwnTokens(
            batch.tokens[:, own].flatten(),
            batch.targets[:, own].flatten(),
            batch.positions[:, own].flatten(),
            ScatteredDocuments(batch, self.ring, self.ulysses),
        )

    def total(self, values: Tensor) -> Tensor:
        all_reduce(values, self.group)
        return values


def own_places(place: Tensor, ring: int, index: int) -> Tensor:
    """Of the places of a row, those of the index-th group of the ring, ascending."""
    chunks = place.view(2 * ring, -1)
    return torch.cat((chunks[index], chunks[2 * ring - 1 - index]))


class ScatteredDocuments:
    """Attention among tokens of which this rank has some. Places and document numbers say who sees whom."""

    def __init__(self, batch: DeviceBatch, ring: Ring, ulysses: Group | None) -> None:
        self.rows, self.length = batch.positions.shape
        self.ring, self.ulysses = ring, ulysses
        self.document, self.starts = (batch.positions == 0).cumsum(1), batch.document_starts
        self._masked: dict[int | None, list[AttentionBlock | None]] = {}
        self._packed: list[AttentionBlock | None] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        width = value.shape[-1]
        packed = query.is_cuda and (window is None or window >= self.length)
        if packed and width != key.shape[-1]:  # our kernel wants both alike
            value = F.pad(value, (0, key.shape[-1] - width))
        if self.ulysses is not None:
            query, key, value = self._tokens_for_heads(self.ulysses, query, key, value)
        query, key, value = (states.unflatten(0, (self.rows, -1)) for states in (query, key, value))
        blocks = self.packed_blocks() if packed else self.masked_blocks(window)
        mixed = ring_attention(query, key, value, scale, self.ring, blocks).flatten(0, 1)
        if self.ulysses is not None:
            mixed = self._heads_for_tokens(self.ulysses, mixed)
        return mixed[..., :width]

    def _tokens_for_heads(
        self, group: Group, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, ...]:
        """[T, heads, ·] of this rank's tokens -> [T · ulysses, heads / ulysses, ·] of the group's, at once."""
        parts = group.size()
        if copies := parts // gcd(parts, key.shape[1]) - 1:  # too few key heads for every rank to have some
            key, value = (states.repeat_interleave(copies + 1, 1) for states in (key, value))
        states = (query, key, value)
        packed = torch.cat([part.reshape(len(part), parts, -1) for part in states], -1)
        arrived = exchanged(packed.transpose(0, 1), None, None, group)
        in_order = (
            arrived.view(parts, self.rows, 2, -1, packed.shape[-1]).permute(1, 2, 0, 3, 4).flatten(0, 3)
        )
        widths = [part[0].numel() // parts for part in states]
        return tuple(
            mine.unflatten(1, (-1, part.shape[-1]))
            for mine, part in zip(in_order.split(widths, 1), states, strict=True)
        )

    def _heads_for_tokens(self, group: Group, mixed: Tensor) -> Tensor:
        parts = group.size()
        by_rank = (
            mixed.reshape(self.rows, 2, parts, -1, mixed[0].numel()).permute(2, 0, 1, 3, 4).flatten(1, 3)
        )
        arrived = exchanged(by_rank, None, None, group)
        return arrived.transpose(0, 1).reshape(by_rank.shape[1], -1, mixed.shape[-1])

    # -- what to do with the keys of each group of the ring, made once per batch ------------------------------
    def masked_blocks(self, window: int | None) -> list[AttentionBlock | None]:
        if window not in self._masked:
            self._masked[window] = [self._masked_block(other, window) for other in range(self.ring.size)]
        return self._masked[window]

    def packed_blocks(self) -> list[AttentionBlock | None]:
        if not self._packed:
            self._packed = [self._packed_block(other) for other in range(self.ring.size)]
        return self._packed

    def _masked_block(self, other: int, window: int | None) -> AttentionBlock | None:
        chunk = self.length // (2 * self.ring.size)
        nearest = (abs(self.ring.index - other) - 1) * chunk + 1  # distance of a query here to a key there
        if window is not None and other != self.ring.index and nearest >= window:
            return None
        queries, keys, mine, theirs = self._meeting(other)
        distance = mine[:, None] - theirs
        near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        same = self.document[:, mine, None] == self.document[:, None, theirs]
        return MaskedBlock(queries, keys, same & near)

    def _packed_block(self, other: int) -> AttentionBlock:
        queries, keys, mine, theirs = self._meeting(other)
        causal = other == self.ring.index
        return PackedBlock(queries, keys, self._starts_among(mine), self._starts_among(theirs), causal)

    def _meeting(self, other: int) -> tuple[slice, slice, Tensor, Tensor]:
        """Which of our tokens of a row see which of the other group's, and their places in the row."""
        ring, own = self.ring.size, self.ring.index
        chunk = self.length // (2 * ring)
        queries = slice(0 if other <= own else chunk, 2 * chunk)
        keys = slice(0, 2 * chunk if other >= own else chunk)
        place = torch.arange(self.length, device=self.document.device)
        return queries, keys, own_places(place, ring, own)[queries], own_places(place, ring, other)[keys]

    def _starts_among(self, places: Tensor) -> Tensor:
        """Where each document of the batch begins among these places of all rows."""
        row = torch.arange(self.rows, device=places.device) * self.length
        among = (row[:, None] + places).flatten().to(self.starts.dtype)
        return torch.searchsorted(among, self.starts, out_int32=True)
