"""RankSlice: what a rank of tensor parallelism does besides its own part of a step: it adds up the ranks' partial
sums and draws from logits whose columns lie on all ranks. `CudaDecoder` and `CudaRunner` call it.

Where each partial sum is written is shared by turns: attention's, then the feed-forward's (and before the first
layer the embedding's). So nobody waits until the others have read (kernels/cuda/collective/one_shot.py says why).
In the batch-invariant mode the expert that every token passes through has a sum of its own, as on one rank.

Ranks of several hosts cannot read each other's memory: `bring` fetches what they show before a kernel reads it.
"""

import torch
from torch import Tensor

from cumulo.kernels.cuda.collective.one_shot import (
    embed_slice,
    gather_columns,
    meet_all,
    sum_partials,
)
from cumulo.kernels.cuda.collective.peers import PeerMemory, aligned, flags_bytes
from cumulo.kernels.cuda.sampling.sample import POSITION, SLOT, part_count, pick_token, weigh_parts
from cumulo.layout.serving import RankPart
from cumulo.ranks.peer_memory import MirroredMemory, bring
from cumulo.spec.model import ModelSpec

_FLOAT32_ROWS = 512


def partial_dtype(rows: int, dtype: torch.dtype, invariant: bool) -> torch.dtype:
    """`invariant`: a sum's bits do not depend on how many rows there are."""
    return torch.float32 if invariant or rows <= _FLOAT32_ROWS else dtype


def partial_bytes(hidden: int, max_rows: int, dtype: torch.dtype, invariant: bool) -> int:
    """Of up to so many rows, whichever precision they have."""
    if invariant:
        return 4 * hidden * max_rows
    return hidden * max(4 * min(max_rows, _FLOAT32_ROWS), dtype.itemsize * max_rows)


ATTENTION, FEED_FORWARD, SHARED_EXPERT = 0, 1, 2


def shared_bytes(
    spec: ModelSpec, max_tokens: int, max_outputs: int, dtype: torch.dtype, ranks: int, invariant: bool
) -> int:
    """What a rank must let the others read; `spec` is the rank's own."""
    partial = aligned(partial_bytes(spec.hidden, max_tokens, dtype, invariant)) * _partials(spec, invariant)
    logits = aligned(max_outputs * spec.vocab_size * dtype.itemsize)
    parts = aligned(max_outputs * part_count(spec.vocab_size) * 4)
    return flags_bytes(ranks) + partial + logits + 3 * parts


def _partials(spec: ModelSpec, invariant: bool) -> int:
    """How many sums take turns."""
    return 3 if invariant and spec.moe is not None and spec.moe.shared_hidden else 2


class RankSlice:
    def __init__(
        self,
        memory: PeerMemory,
        part: RankPart,
        max_tokens: int,
        max_outputs: int,
        dtype: torch.dtype,
        invariant: bool,
    ) -> None:
        """`invariant`: a sum's bits do not depend on how many rows there are."""
        self.memory, self.rank, self.ranks = memory, memory.rank, memory.ranks
        spec, self.first_expert, self._first = part.local, part.experts.start, part.vocabulary.start
        self._hidden, self._dtype, self._invariant = spec.hidden, dtype, invariant
        size = partial_bytes(spec.hidden, max_tokens, dtype, invariant)
        self._partials = [memory.carve((size,), torch.uint8) for _ in range(_partials(spec, invariant))]
        self._logits = memory.carve((max_outputs, spec.vocab_size), dtype)
        shape = (max_outputs, part_count(spec.vocab_size))
        self._maxima = memory.carve(shape, torch.float32)
        self._places = memory.carve(shape, torch.int32)
        self._masses = memory.carve(shape, torch.float32)
        device = self._logits.own.device
        self.whole_logits = torch.empty(
            (max_outputs, spec.vocab_size * self.ranks), dtype=dtype, device=device
        )

    @property
    def logits(self) -> Tensor:
        """Where this rank's columns go."""
        return self._logits.own

    def embed(self, token_ids: Tensor, weight: Tensor, stream: Tensor) -> None:
        embed_slice(token_ids, weight, self._first, self.partial(FEED_FORWARD, len(stream)))
        self._sum(FEED_FORWARD, stream, add=False, rounded=False)

    def partial(self, half: int, rows: int) -> Tensor:
        """Where this rank's partial sum of a half-layer goes."""
        numbers = self._partials[half].own.view(self._dtype_of(rows))
        return numbers[: rows * self._hidden].view(rows, self._hidden)

    def add_partials(self, half: int, stream: Tensor, rounded: bool = False) -> None:
        """`rounded`: where one rank would round the product before it adds it."""
        self._sum(half, stream, add=True, rounded=rounded)

    def _sum(self, half: int, stream: Tensor, add: bool, rounded: bool) -> None:
        dtype = self._dtype_of(len(stream))
        bring(self.memory, self._partials[half], self.partial(half, len(stream)))
        sum_partials(self.memory, self._partials[half], dtype, stream, add, rounded)

    def _dtype_of(self, rows: int) -> torch.dtype:
        return partial_dtype(rows, self._dtype, self._invariant)

    def draw(self, rows: int, draws: Tensor, picked: Tensor, tokens: Tensor) -> None:
        """Draws as `sample` does; only each part's maximum and mass, and the part that is drawn from, cross to
        others. Every step ends with it, also one without rows: after it a rank may write what the others read."""
        own = self._logits.own[:rows]
        if rows:
            weigh_parts(own, draws, self._maxima.own, self._places.own, self._masses.own)
            for parts in (self._maxima, self._places, self._masses):
                bring(self.memory, parts, parts.own[:rows])
        meet_all(self.memory)
        if rows:
            pick_token(
                own, draws, self._maxima.addresses, self._places.addresses, self._masses.addresses, picked, tokens,
                self._logits.addresses,
            )  # fmt: skip
            if isinstance(self.memory, MirroredMemory):
                self._share_draws(self.memory, draws[:rows], picked[:rows], tokens)

    def _share_draws(self, memory: MirroredMemory, draws: Tensor, picked: Tensor, tokens: Tensor) -> None:
        """All ranks know which part a token is drawn from, but only its owner has the logits: the others drew
        nonsense from that part, which the owner's token replaces."""
        owned = (picked >= self._first) & (picked < self._first + self._logits.own.shape[1])
        right = torch.where(owned, picked, -1)
        memory.group.largest(right)
        picked.copy_(right)
        slots, positions = draws[:, SLOT].long(), draws[:, POSITION].long()
        # Added as a difference: rows that fill a step up have no slot, and must not overwrite anybody's token.
        places = torch.where(slots >= 0, slots * tokens.stride(0) + positions, 0)
        entered = tokens.view(-1)
        difference = torch.where(slots >= 0, right.clamp_min(0) - entered[places], 0)
        entered.scatter_add_(0, places, difference)

    def end_step(self) -> None:
        """Ends the step of a stage that draws nothing: after it a rank may write what the others read."""
        meet_all(self.memory)

    def gather(self, rows: int) -> Tensor:
        """The whole logits of the last step, for draws that look at all of a row."""
        bring(self.memory, self._logits, self._logits.own[:rows])
        return gather_columns(self.memory, self._logits, self.whole_logits[:rows])
