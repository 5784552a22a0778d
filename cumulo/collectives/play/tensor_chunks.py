"""TensorChunks: where the chunks of a schedule lie in a rank's own tensors. All players use it.

In place: all_reduce, broadcast and reduce have one tensor; all_gather one with all blocks, of which the own is
filled; reduce_scatter one with all blocks, of which the own is right afterwards. all_to_all has two.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulo.collectives.decide.schedule import CollectiveSchedule, Move, Transfer
from cumulo.errors import ConfigError

_NARROW = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


class TensorChunks:
    def __init__(
        self, schedule: CollectiveSchedule, rank: int, tensor: Tensor, received: Tensor | None = None
    ) -> None:
        self._schedule, self._rank = schedule, rank
        self.whole = _flat(tensor, "the tensor of a collective")
        self.dtype = tensor.dtype
        self._other: dict[int, Tensor] = {}  # of an all-to-all, what is not the start of `whole`
        # Chunks that have no value yet: the first part of them that arrives is copied.
        self.empty = set(range(len(schedule.sizes))) if rank >= schedule.ranks else set()
        if schedule.collective == "all_to_all":
            self._place_pairs(received)
        elif self.whole.numel() != schedule.offsets[-1]:
            raise ConfigError(
                f"{schedule.name}: the schedule is for {schedule.offsets[-1]} elements, the tensor has "
                f"{self.whole.numel()}"
            )

    def _place_pairs(self, received: Tensor | None) -> None:
        schedule, rank, ranks = self._schedule, self._rank, self._schedule.ranks
        if received is None:
            raise ConfigError(f"{schedule.name} needs a second tensor for what is received")
        flat, at = _flat(received, "the received tensor"), 0
        for chunk in range(rank * ranks, (rank + 1) * ranks):
            self._other[chunk] = self.whole[at : at + schedule.sizes[chunk]]
            at += schedule.sizes[chunk]
        sent, at = at, 0
        for source in range(ranks):
            chunk = source * ranks + rank
            part = flat[at : at + schedule.sizes[chunk]]
            at += schedule.sizes[chunk]
            if source == rank:
                part.copy_(self._other[chunk])
            self._other[chunk] = part
        if sent != self.whole.numel() or at != flat.numel():
            raise ConfigError(
                f"{schedule.name}: rank {rank} sends {sent} and receives {at} elements, and its tensors have "
                f"{self.whole.numel()} and {flat.numel()}"
            )

    def views(self, transfer: Transfer) -> list[Tensor]:
        """One for a run that lies together, else one for each chunk."""
        if self._schedule.collective != "all_to_all":
            offsets = self._schedule.offsets
            return [self.whole[offsets[transfer.chunk] : offsets[transfer.chunk + transfer.count]]]
        for chunk in transfer.chunks:
            if chunk not in self._other:  # on its way to another
                self._other[chunk] = self.whole.new_empty(self._schedule.sizes[chunk])
        return [self._other[chunk] for chunk in transfer.chunks]

    def take_in(self, arrived: Sequence[tuple[Transfer, list[Tensor]]]) -> None:
        """What a step brought, added in the order of ranks."""
        parts: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for transfer, pieces in arrived:
            for chunk, count, home, piece in self._cut(transfer, pieces):
                if transfer.move is Move.COPY:
                    home.copy_(piece)
                    self.empty.difference_update(range(chunk, chunk + count))
                else:
                    parts.setdefault((chunk, count), []).append((transfer.peer, piece))
        for (chunk, count), some in parts.items():
            self._add(chunk, count, some)

    def _cut(self, transfer: Transfer, pieces: list[Tensor]) -> list[tuple[int, int, Tensor, Tensor]]:
        own = self.views(transfer)
        if len(own) == 1:
            return [(transfer.chunk, transfer.count, own[0], pieces[0])]
        return [
            (chunk, 1, home, piece) for chunk, home, piece in zip(transfer.chunks, own, pieces, strict=True)
        ]

    def _add(self, chunk: int, count: int, parts: list[tuple[int, Tensor]]) -> None:
        own = self.views(Transfer(Move.REDUCE, self._rank, chunk, count))[0]
        if chunk in self.empty:
            self.empty.difference_update(range(chunk, chunk + count))
        elif len(parts) == 1:
            add(own, parts[0][1], own)
            return
        else:
            parts = [*parts, (self._rank, own)]
        ordered = [part for _, part in sorted(parts, key=lambda one: one[0])]
        total = ordered[0].clone() if len(ordered) > 1 else ordered[0]
        for part in ordered[1:]:
            add(total, part, total)
        own.copy_(total)


def add(first: Tensor, second: Tensor, out: Tensor) -> None:
    if first.dtype in _NARROW:  # torch adds no eight-bit floats: one rounding, from float32
        out.copy_((first.float() + second.float()).to(first.dtype))
    else:
        torch.add(first, second, out=out)


def _flat(tensor: Tensor, what: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ConfigError(f"{what} must be contiguous; give tensor.contiguous()")
    return tensor.detach().view(-1)
