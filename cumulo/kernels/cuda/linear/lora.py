"""lora: y += B (A x) for rows with different adapters, in two launches for all adapters of a batch (Punica, Chen et
al. 2023; S-LoRA, Sheng et al. 2023). Of the same tensors as the reference, `kernels/low_rank.py`.

Must move: each adapter's A and B once for every 16 of its rows, and y twice. A program takes up to 16 rows of a
group and 16 of the ranks (shrink) or a tile of the outputs (expand). The inputs are cut among several programs,
whose sums the second launch adds up in a fixed order: a row's bits do not depend on its batch. Groups that only
fill a captured graph up have slot -1 and do nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.work import Work
from cumulo.kernels.low_rank import MOST_ROWS, AdapterGroups, LowRankStack

RANK_TILE = 16
ROW_TILE = 16  # the fewest that matrix units take: most groups of a batch have fewer rows
_ROW_TILES = MOST_ROWS // ROW_TILE


@dataclass(frozen=True, slots=True)
class LoraTiles:
    block_k: int = 128
    splits: int = 8  # programs that share the inputs
    block_n: int = 512
    warps: int = 4
    stages: int = 3


def work(rows: int, groups: int, stack: LowRankStack, rank: int) -> Work:
    """Of so many groups with adapters of one rank."""
    parts, (_, outputs, _), inputs = len(stack.bounds) - 1, stack.b.shape, stack.a.shape[2]
    weights = groups * rank * (parts * inputs + outputs)
    moved = weights + rows * (inputs + 2 * outputs)
    return Work(bytes=moved * stack.a.itemsize, flops=2 * rows * rank * (parts * inputs + outputs))


def most_groups(rows: int, slots: int) -> int:
    """Groups that so many rows can have: what a captured graph has room for."""
    return min(rows, slots + rows // MOST_ROWS)


def low_buffer(stack: LowRankStack, rows: int, config: LoraTiles = LoraTiles()) -> Tensor:
    """What the two launches work in, for up to `rows` rows that have an adapter."""
    return stack.a.new_empty((config.splits, rows, stack.a.shape[1]), dtype=torch.float32)


def shrink(
    x: Tensor, stack: LowRankStack, groups: AdapterGroups, low: Tensor, config: LoraTiles = LoraTiles()
) -> None:
    """low = A x, in `config.splits` sums."""
    if not len(groups.slots):
        return
    _shrink[len(groups.slots) * _ROW_TILES, stack.a.shape[1] // RANK_TILE, config.splits](
        x, stack.a, low, groups.rows, groups.starts, groups.slots, stack.device_ranks, x.shape[1], x.stride(0),
        stack.a.stride(0), low.stride(0), low.stride(1), BLOCK_K=config.block_k, **_constants(stack, config),
    )  # fmt: skip


def expand(
    y: Tensor,
    stack: LowRankStack,
    groups: AdapterGroups,
    low: Tensor,
    config: LoraTiles = LoraTiles(),
    add: bool = True,
) -> Tensor:
    """y += B low, in place; without `add` y = B low in the rows that have an adapter."""
    if not len(groups.slots):
        return y
    outputs, block_n = y.shape[1], _column_tile(stack.bounds, config.block_n)
    first, second = (*stack.bounds[1:-1], outputs, outputs)[:2]
    _expand[len(groups.slots) * _ROW_TILES, outputs // block_n](
        low, stack.b, y, groups.rows, groups.starts, groups.slots, stack.device_ranks, y.stride(0),
        *stack.b.stride(), low.stride(0), low.stride(1), first, second, BLOCK_N=block_n, ADD=add,
        **_constants(stack, config),
    )  # fmt: skip
    return y


def _constants(stack: LowRankStack, config: LoraTiles) -> dict[str, int]:
    return {
        "PARTS": len(stack.bounds) - 1, "RANK_MAX": stack.rank_max, "ROWS": ROW_TILE, "TILES": _ROW_TILES,
        "TILE": RANK_TILE, "SPLITS": config.splits, "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip


def _column_tile(bounds: tuple[int, ...], widest: int) -> int:
    """The widest that no section of the outputs cuts."""
    while widest >= 16:
        if all(bound % widest == 0 for bound in bounds):
            return widest
        widest //= 2
    raise ValueError(f"sections of a matrix must be multiples of 16, got {bounds}")


@triton.jit
def _shrink(x, a, low, rows, starts, slots, ranks, K, stride_x, stride_a, stride_split, stride_low,
            PARTS: tl.constexpr, RANK_MAX: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
            TILE: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    group, tile, split = tl.program_id(0) // TILES, tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + group)
    if slot < 0:
        return
    part = tile // (RANK_MAX // TILE)
    begin = tl.load(starts + group) + tl.program_id(0) % TILES * ROWS
    end = tl.load(starts + group + 1)
    rank = tl.load(ranks + slot * PARTS + part)
    if (begin >= end) | (tile % (RANK_MAX // TILE) * TILE >= rank):
        return
    index = begin + tl.arange(0, ROWS)
    here = index < end
    row = tl.load(rows + index, mask=here, other=0).to(tl.int64)
    own = tile * TILE + tl.arange(0, TILE)  # rows of the slot's A
    a += slot.to(tl.int64) * stride_a
    sums = tl.zeros((ROWS, TILE), dtype=tl.float32)
    for left in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
        column = left + tl.arange(0, BLOCK_K)
        inside = column < K
        xs = tl.load(
            x + row[:, None] * stride_x + column[None, :], mask=here[:, None] & inside[None, :], other=0.0
        )
        weights = tl.load(a + own[None, :] * K + column[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(xs, weights.to(xs.dtype), sums, input_precision="ieee")
    places = low + split * stride_split + index[:, None].to(tl.int64) * stride_low + own[None, :]
    tl.store(places, sums, mask=here[:, None])


@triton.jit
def _expand(low, b, y, rows, starts, slots, ranks, stride_y, stride_b, stride_output, stride_rank, stride_split,
            stride_low, first, second, PARTS: tl.constexpr, RANK_MAX: tl.constexpr, ROWS: tl.constexpr,
            TILES: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
            ADD: tl.constexpr):  # fmt: skip
    group, left = tl.program_id(0) // TILES, tl.program_id(1) * BLOCK_N
    slot = tl.load(slots + group)
    if slot < 0:
        return
    part = (left >= first).to(tl.int32) + (left >= second).to(tl.int32)
    begin = tl.load(starts + group) + tl.program_id(0) % TILES * ROWS
    end = tl.load(starts + group + 1)
    rank = tl.load(ranks + slot * PARTS + part)
    if (begin >= end) | (ADD & (rank == 0)):
        return
    column = left + tl.arange(0, BLOCK_N)
    index = begin + tl.arange(0, ROWS)
    here = index < end
    row = tl.load(rows + index, mask=here, other=0).to(tl.int64)
    own = tl.arange(0, TILE)
    b += slot.to(tl.int64) * stride_b + column[None, :] * stride_output
    weights = tl.load(
        b + own[:, None] * stride_rank
    )  # of the first ranks: nothing else has to be read before
    places = y + row[:, None] * stride_y + column[None, :]
    if ADD:
        sums = tl.load(places, mask=here[:, None], other=0.0).to(tl.float32)
    else:
        sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    low += index[:, None].to(tl.int64) * stride_low + part * RANK_MAX + own[None, :]
    for tile in range(0, rank, TILE):
        found = tl.zeros((ROWS, TILE), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            found += tl.load(low + split * stride_split + tile, mask=here[:, None], other=0.0)
        sums = tl.dot(found.to(weights.dtype), weights, sums, input_precision="ieee")
        if RANK_MAX > TILE:
            ahead = tile + TILE + own
            weights = tl.load(b + ahead[:, None] * stride_rank, mask=ahead[:, None] < rank, other=0.0)
    tl.store(places, sums.to(y.dtype.element_ty), mask=here[:, None])
