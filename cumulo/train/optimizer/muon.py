"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024). Used by `optimizer.py`.

torch has a Muon for plain matrices; ours also takes the decoder's fused matrices apart (query, key and value are
three maps, not one) and treats stacked experts as the batch of matrices they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.layout.pieces import Box, piece_of, zero_rows
from cumulo.ranks.collectives import all_gather_list
from cumulo.ranks.groups import Groups
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.optimizer.sink import Shard

# A quintic whose iteration drives singular values towards 1 from anywhere in (0, 1] (Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class WholeMatrix:
    """A matrix of which ranks have rows and slices, put together for as long as its direction is made orthogonal,
    by every rank, which keeps its own part. Each expert is a matrix of its own: only its slices are gathered."""

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
        """The shape of what `gather` gives."""
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


@dataclass(frozen=True, slots=True, eq=False)
class MuonMatrix:
    """One parameter: where it is, its momentum, and how many rows each of the maps fused into it has."""

    parameter: Tensor
    momentum: Tensor
    parts: tuple[int, ...]
    # Where this process has a part of the matrix only; `parts` are the whole one's.
    whole: WholeMatrix | None = None


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """U Vᵀ of the singular value decomposition, nearly: singular values end between 0.7 and 1.2. [..., M, N]."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if tall:
        x = x.mT
    return x


class Muon:
    """A rule of the optimizer's."""

    def __init__(self, matrices: Mapping[str, MuonMatrix], config: OptimizerConfig) -> None:
        self.matrices, self.config = matrices, config

    @torch.no_grad()
    def step(self, share: float) -> None:
        momentum, rate = self.config.muon_momentum, self.config.muon_learning_rate * share
        for matrix in self.matrices.values():
            gradient = matrix.parameter.grad
            if gradient is None:
                continue
            # Half precision suffices for a direction, and is faster where there are units for it.
            dtype = torch.bfloat16 if gradient.is_cuda else gradient.dtype
            matrix.momentum.lerp_(gradient, 1 - momentum)
            nesterov = gradient.lerp(matrix.momentum, momentum)
            whole = nesterov if matrix.whole is None else matrix.whole.gather(nesterov)
            change = torch.cat([_change(part, dtype) for part in whole.split(matrix.parts, -2)], -2)
            own = change if matrix.whole is None else matrix.whole.cut(change).to(matrix.parameter.device)
            matrix.parameter.mul_(1 - rate * self.config.weight_decay)
            matrix.parameter.sub_(own.to(matrix.parameter.dtype), alpha=rate)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.momentum": matrix.momentum
            for name, matrix in self.matrices.items()
            if matrix.momentum.numel()
        }

    def loaded(self) -> None:
        """They are the live tensors."""


def _change(direction: Tensor, dtype: torch.dtype) -> Tensor:
    """The change of one map: its direction made orthogonal, longer for tall ones (Jordan 2024)."""
    rows, columns = direction.shape[-2:]
    return orthogonalise(direction, dtype).mul(max(1.0, rows / columns) ** 0.5)
