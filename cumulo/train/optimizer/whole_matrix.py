"""WholeMatrix: a matrix of which ranks hold rows and slices, put together for as long as a rule needs it whole.

Muon's directions go through it: every rank makes the whole one orthogonal and keeps its own part. Each expert is a
matrix of its own: only its slices are gathered.
"""

import torch
from torch import Tensor

from cumulo.layout.box import Box
from cumulo.layout.pieces import piece_of, zero_rows
from cumulo.ranks.collectives import all_gather_list
from cumulo.ranks.groups import Groups
from cumulo.spec.model import ModelSpec
from cumulo.train.optimizer.sink import Shard


class WholeMatrix:
    def __init__(self, shard: Shard, spec: ModelSpec, groups: Groups) -> None:
        piece, layout = shard.piece, groups.layout
        self._shard, self._piece = shard, piece
        self._axis = piece.zero_axis
        self._row_group = groups.group(self._axis) if layout.zero and not piece.expert else None
        self._row_ranks = groups.size(self._axis)
        self._slice_group = groups.group("tp") if piece.sliced and layout.tp > 1 else None
        # Every slice's boxes, in the order of the tensor-parallel ranks.
        members = groups.members("tp") if self._slice_group else (groups.rank,)
        self._slices = [piece_of(spec, layout, rank, piece.name, piece.whole).boxes for rank in members]
        self._own = members.index(groups.rank)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what `gather` gives."""
        piece = self._piece
        return (self._shard.end - self._shard.begin, *piece.whole[1:]) if piece.expert else piece.whole

    def gather(self, own: Tensor) -> Tensor:
        """From every rank's part."""
        piece = self._rows(own.to(self._shard.tensor.device))
        if self._slice_group is None:
            return piece
        found = all_gather_list(piece.contiguous(), self._slice_group)
        whole = piece.new_empty(self.shape)
        for part, boxes in zip(found, self._slices, strict=True):
            for box in boxes:
                whole[self._in_whole(box)] = part[self._in_piece(box)]
        return whole

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part."""
        piece = whole
        if self._slice_group is not None:
            rows = len(whole) if self._piece.expert else self._piece.shape[0]
            piece = whole.new_empty(rows, *self._piece.shape[1:])
            for box in self._slices[self._own]:
                piece[self._in_piece(box)] = whole[self._in_whole(box)]
        return piece if self._row_group is None else piece[self._shard.begin : self._shard.end]

    def _rows(self, own: Tensor) -> Tensor:
        if self._row_group is None:
            return own
        rows, ranks = self._piece.shape[0], self._row_ranks
        sent = own.new_zeros(zero_rows(rows, ranks, 0)[1], *own.shape[1:])
        sent[: len(own)] = own
        return torch.cat(all_gather_list(sent, self._row_group))[:rows]  # only the last ones are short

    def _in_piece(self, box: Box) -> tuple[slice, ...]:
        return (slice(None), *box.held_slices[1:]) if self._piece.expert else box.held_slices

    def _in_whole(self, box: Box) -> tuple[slice, ...]:
        return (slice(None), *box.whole_slices[1:]) if self._piece.expert else box.whole_slices
