"""GradientSink: where the gradients of a step go, and what of each parameter this rank's optimizer moves.

The pipeline's player feeds it, `ShardedOptimizer` takes from it. It is one of `OneRank`, `DataParallel`, `Zero1`
and `FullySharded`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from cumulo.layout.pieces import Piece
from cumulo.pipeline.play.run import Sink
from cumulo.ranks.groups import Group, Groups, new_group

FsdpPrefetch = Literal["pre", "post"]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The rows [begin, end) of a rank's piece of a parameter, which this rank's optimizer moves."""

    # The weights themselves: what is written here is what the model computes with after `spread`.
    tensor: Tensor
    piece: Piece
    begin: int
    end: int
    holders: int  # ranks that move the same rows, this one included
    trained: bool  # False: frozen, or steered by something else than a gradient
    dtype: torch.dtype  # the model computes in it; where `tensor` is wider, it is the master copy


class GradientSink(Sink, Protocol):
    """One step is `begin`, backward passes with `last` before each chunk's last one, `finish`; then `spread`."""

    @property
    def shards(self) -> Mapping[str, Shard]:
        """By the parameter's name. A shard may be empty: there are parameters with fewer rows than ranks."""
        ...

    def begin(self) -> None:
        """Before a step's first backward: gradients are nothing."""
        ...

    def leaves(self, chunk: int) -> Iterator[nn.Parameter]:
        """The parameters that the chunk's forward computed with: what its backward gives gradients to."""
        ...

    def finish(self) -> dict[str, Tensor]:
        """After the last backward: each trained shard's gradient, summed over all ranks that have a part of it."""
        ...

    def spread(self, frozen: bool = False) -> None:
        """After the shards were written: every rank computes with the new weights. `frozen`: all of them were, not
        only those that are trained."""
        ...


class RestGroups:
    """The groups of ranks with the same tokens that have parts of one gradient, too: tensor-parallel ranks (see
    `Piece.partial_over_tp`), and stages that hold a copy (DualPipe's second one, a tied embedding)."""

    def __init__(self, pieces: Mapping[str, Piece], groups: Groups) -> None:
        layout, rank = groups.layout, groups.rank
        own = layout.place(rank)
        self.members: dict[str, tuple[int, ...]] = {}
        for name, piece in pieces.items():
            places = {other: layout.place(other) for other in piece.holders}
            self.members[name] = tuple(
                other
                for other, at in places.items()
                if (at.dp, at.cp) == (own.dp, own.cp) and (piece.partial_over_tp or at.tp == own.tp)
            )
        self._groups: dict[tuple[int, ...], Group] = {}
        # In sorted order, so that ranks with several groups in common make them in the same order.
        for members in sorted(set(self.members.values())):
            if len(members) > 1 and members == groups.members("tp"):
                self._groups[members] = groups.group("tp")
            elif len(members) > 1:
                self._groups[members] = new_group(members)

    def group(self, name: str) -> Group | None:
        """None: no other rank has a part."""
        members = self.members[name]
        return self._groups[members] if len(members) > 1 else None


def layers_of(module: nn.Module) -> Iterable[nn.Module]:
    """The repeated layers of a chunk."""
    layers = module.get_submodule("layers")
    return layers.values() if isinstance(layers, nn.ModuleDict) else layers.children()
