"""What each rank of a layout brings to a checkpoint: its shards of weights and optimizer, with their places in the
whole. The trainer saves and loads it; under another layout the same names are cut otherwise."""

from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor

from cumulo.checkpoint.play.held import Held
from cumulo.layout.layout import Axis, Layout
from cumulo.layout.pieces import Piece, whole_box, zero_rows
from cumulo.train.optimizer.sink import Shard


def held_state(
    shards: Mapping[str, Shard],
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    layout: Layout,
    rank: int,
) -> dict[str, Held]:
    """`weights` by name, `optimizer`'s tensors by `NAME.slot`; both are the shards' rows. After loading, the
    optimizer must be told."""
    found: dict[str, Held] = {}
    for name, tensor in weights.items():
        if tensor.numel():
            found[f"model.{name}"] = _rows(shards[name], tensor, layout, rank)
    for name, tensor in optimizer.items():
        shard = shards[name.rpartition(".")[0]]
        if tensor.ndim:
            found[f"optimizer.{name}"] = _rows(shard, tensor, layout, rank)
        else:  # a count of steps, the same for all parts of the parameter
            found[f"optimizer.{name}"] = Held(tensor, (), (whole_box(()),), any_rows(layout, shard.piece))
    return found


def _rows(shard: Shard, tensor: Tensor, layout: Layout, rank: int) -> Held:
    piece = shard.piece
    return Held(
        tensor.detach(),
        piece.whole,
        piece.cut_rows(shard.begin, shard.end),
        same_rows(layout, piece, rank),
    )


def same_rows(layout: Layout, piece: Piece, rank: int) -> tuple[int, ...]:
    """The ranks whose optimizers move the same rows of a piece."""
    own = _row_range(layout, piece, rank)
    return tuple(other for other in piece.holders if _row_range(layout, piece, other) == own)


def any_rows(layout: Layout, piece: Piece) -> tuple[int, ...]:
    """The ranks whose optimizers move some of a piece's parameter, of whatever slice or expert."""
    stages = {layout.place(holder).pp for holder in piece.holders}
    return tuple(
        rank
        for rank in range(layout.world)
        if layout.place(rank).pp in stages and _row_range(layout, piece, rank) != (0, 0)
    )


def _row_range(layout: Layout, piece: Piece, rank: int) -> tuple[int, int]:
    """(0, 0): it has none of them."""
    rows = piece.shape[0]
    if not layout.zero:
        return 0, rows
    begin, end = zero_rows(rows, *_places(layout, piece.zero_axis)[rank])
    return (begin, end) if begin < end else (0, 0)


@lru_cache(maxsize=16)
def _places(layout: Layout, axis: Axis) -> tuple[tuple[int, int], ...]:
    """For every rank: how many its group has, and which of them it is."""
    found = [(0, 0)] * layout.world
    for members in layout.groups(axis):
        for index, rank in enumerate(members):
            found[rank] = len(members), index
    return tuple(found)
