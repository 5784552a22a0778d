"""lora: y += B (A x) for rows with different adapters, in two launches for all adapters of a batch (Punica, Chen et
al. 2023; S-LoRA, Sheng et al. 2023). Of the same tensors as the reference, `kernels/low_rank.py`.

Must move: each adapter's A and B once for every group of up to 32 of its rows, and y twice. A program takes a group
and 16 of the ranks (shrink) or a tile of the outputs (expand), so an adapter's weights are read once whatever its
rows. The inputs are cut among several programs, whose sums the second launch adds up in a fixed order: a row's bits
do not depend on its batch. Groups that only fill a captured graph up have slot -1 and do nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.work import Work
from cumulo.kernels.low_rank import MOST_ROWS, AdapterGroups, LowRankStack

RANK_TILE = 16


@dataclass(frozen=True, slots=True)
class LoraTiles:
    block_k: int = 128
    splits: int = 4  # programs that share the inputs
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


def padded(groups: AdapterGroups, count: int) -> AdapterGroups:
    """The same groups, filled up with empty ones for a launch of fixed size."""
    more = count - len(groups.slots)
    last = groups.starts[-1:].expand(more)
    nothing = groups.slots.new_full((more,), -1)
    return AdapterGroups(
        groups.of_row,
        groups.rows,
        torch.cat((groups.starts, last)),
        torch.cat((groups.slots, nothing)),
        groups.bounds,
    )


def low_buffer(stack: LowRankStack, rows: int, config: LoraTiles = LoraTiles()) -> Tensor:
    """What the two launches work in, for up to `rows` rows that have an adapter."""
    return stack.a.new_empty((config.splits, rows, stack.a.shape[1]), dtype=torch.float32)


def add_lora(
    x: Tensor,
    y: Tensor,
    stack: LowRankStack,
    groups: AdapterGroups,
    low: Tensor | None = None,
    config: LoraTiles = LoraTiles(),
) -> Tensor:
    """y [T, outputs] plus what each row's adapter makes of x [T, inputs]; in place. `low`: of `low_buffer`."""
    count, parts, rank_max = len(groups.slots), len(stack.bounds) - 1, stack.rank_max
    if count == 0:
        return y
    if low is None:
        low = low_buffer(stack, len(groups.rows), config)
    inputs, outputs = x.shape[1], y.shape[1]
    block_n = _column_tile(stack.bounds)
    constants = {
        "PARTS": parts, "RANK_MAX": rank_max, "ROWS": MOST_ROWS, "TILE": RANK_TILE, "SPLITS": config.splits,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    tables = groups.rows, groups.starts, groups.slots, stack.device_ranks
    _shrink[count, parts * rank_max // RANK_TILE, config.splits](
        x, stack.a, low, *tables, inputs, x.stride(0), stack.a.stride(0), low.stride(0), low.stride(1),
        BLOCK_K=config.block_k, **constants,
    )  # fmt: skip
    first, second = (*stack.bounds[1:-1], outputs, outputs)[:2]
    _expand[count, outputs // block_n](
        low, stack.b, y, *tables, y.stride(0), *stack.b.stride(), low.stride(0), low.stride(1), first, second,
        BLOCK_N=block_n, **constants,
    )  # fmt: skip
    return y


def _column_tile(bounds: tuple[int, ...]) -> int:
    """The widest that no section of the outputs cuts."""
    for size in (128, 64, 32, 16):
        if all(bound % size == 0 for bound in bounds):
            return size
    raise ValueError(f"sections of a matrix must be multiples of 16, got {bounds}")


@triton.jit
def _shrink(x, a, low, rows, starts, slots, ranks, K, stride_x, stride_a, stride_split, stride_low,
            PARTS: tl.constexpr, RANK_MAX: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
            BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + group)
    if slot < 0:
        return
    part = tile // (RANK_MAX // TILE)
    if tile % (RANK_MAX // TILE) * TILE >= tl.load(ranks + slot * PARTS + part):
        return
    index = tl.load(starts + group) + tl.arange(0, ROWS)
    here = index < tl.load(starts + group + 1)
    row = tl.load(rows + index, mask=here, other=0).to(tl.int64)
    own = tile * TILE + tl.arange(0, TILE)  # rows of the slot's A
    a += slot.to(tl.int64) * stride_a
    sums = tl.zeros((ROWS, TILE), dtype=tl.float32)
    for begin in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
        column = begin + tl.arange(0, BLOCK_K)
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
            TILE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    group, begin = tl.program_id(0), tl.program_id(1) * BLOCK_N
    slot = tl.load(slots + group)
    if slot < 0:
        return
    part = (begin >= first).to(tl.int32) + (begin >= second).to(tl.int32)
    rank = tl.load(ranks + slot * PARTS + part)
    if rank == 0:
        return
    index = tl.load(starts + group) + tl.arange(0, ROWS)
    here = index < tl.load(starts + group + 1)
    row = tl.load(rows + index, mask=here, other=0).to(tl.int64)
    column = begin + tl.arange(0, BLOCK_N)
    places = y + row[:, None] * stride_y + column[None, :]
    sums = tl.load(places, mask=here[:, None], other=0.0).to(tl.float32)
    b += slot.to(tl.int64) * stride_b + column[None, :] * stride_output
    for tile in range(0, rank, TILE):
        own = tile + tl.arange(0, TILE)
        found = tl.zeros((ROWS, TILE), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            held = low + split * stride_split + index[:, None].to(tl.int64) * stride_low
            found += tl.load(held + part * RANK_MAX + own[None, :], mask=here[:, None], other=0.0)
        weights = tl.load(b + own[:, None] * stride_rank)
        sums = tl.dot(found.to(weights.dtype), weights, sums, input_precision="ieee")
    tl.store(places, sums.to(y.dtype.element_ty), mask=here[:, None])
