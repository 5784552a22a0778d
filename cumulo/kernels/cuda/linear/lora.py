"""lora: y += B (A x) for rows with different adapters, in two launches for all adapters of a batch (Punica,
Chen et al. 2023; S-LoRA, Sheng et al. 2023). Of the same tensors as the reference, `kernels/low_rank.py`.

Must move: each adapter's A and B once for every 16 of its rows, and y twice. The first half cuts the inputs among
several programs, whose sums the second half adds up in a fixed order: a row's bits do not depend on its batch.
Next to the base's product few multiprocessors are free, so a program keeps as many loads on their way as it
can: it goes through a run of the inputs (shrink) or of the outputs (expand) with several tiles ahead. Groups
that only fill a captured graph up have slot -1 and do nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.low_rank import MOST_ROWS, AdapterGroups, LowRankStack

RANK_TILE = 16
ROW_TILE = 16  # the fewest that matrix units take: most groups of a batch have fewer rows
_ROW_TILES = MOST_ROWS // ROW_TILE


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Tiles of the first half: inputs of a tile and of a program, warps and tiles on their way. Of the second:
    the elements of B of a tile, programs that share a group's outputs at least, warps and tiles on their way.

    Chosen by the time of whole steps, not of these kernels alone: the base's product starts only where they leave
    room, and programs of the first half that were faster by themselves made the step longer."""

    block_k: int = 128
    columns: int = 1024
    warps: int = 2
    stages: int = 4
    elements: int = 8192
    programs: int = 16
    expand_warps: int = 8
    expand_stages: int = 3

    def splits(self, inputs: int) -> int:
        """Programs that share the inputs."""
        return -(-inputs // self.columns)


def most_groups(rows: int, slots: int) -> int:
    """Groups that so many rows can have: what a captured graph has room for."""
    return min(rows, slots + rows // MOST_ROWS)


def low_buffer(stacks: Sequence[LowRankStack], rows: int, config: LoraTiles = LoraTiles()) -> Tensor:
    """What the two launches work in, for up to `rows` rows that have an adapter, of any of these matrices."""
    floats = max(config.splits(stack.a.shape[2]) * stack.a.shape[1] for stack in stacks)
    return stacks[0].a.new_empty(rows * floats, dtype=torch.float32)


def shrink(
    x: Tensor, stack: LowRankStack, groups: AdapterGroups, low: Tensor, config: LoraTiles = LoraTiles()
) -> None:
    """low = A x, in as many sums as `config` cuts the inputs."""
    if not len(groups.slots):
        return
    width, inputs = stack.a.shape[1:]
    _shrink[len(groups.slots) * _ROW_TILES, width // RANK_TILE, config.splits(inputs)](
        x, stack.a, low, groups.rows, groups.starts, groups.slots, stack.device_ranks, inputs, x.stride(0),
        stack.a.stride(0), len(groups.rows) * width, width, PARTS=len(stack.bounds) - 1,
        RANK_MAX=stack.rank_max, ROWS=ROW_TILE, TILES=_ROW_TILES, TILE=RANK_TILE, BLOCK_K=config.block_k,
        COLUMNS=config.columns, STAGES=config.stages, num_warps=config.warps, num_stages=config.stages,
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
    outputs, (width, inputs) = y.shape[1], stack.a.shape[1:]
    ranks = max(RANK_TILE, triton.next_power_of_2(stack.rank_max))
    block_n = max(16, config.elements // ranks)
    # Onto y there are many rows, so enough programs without runs, and each waits for its part of y.
    run = _column_run(stack.bounds, block_n if add else max(16, outputs // config.programs))
    block_n = min(run, block_n)
    first, second = (*stack.bounds[1:-1], outputs, outputs)[:2]
    _expand[len(groups.slots) * _ROW_TILES, outputs // run](
        low, stack.b, y, groups.rows, groups.starts, groups.slots, stack.device_ranks, y.stride(0),
        *stack.b.stride(), len(groups.rows) * width, width, first, second, PARTS=len(stack.bounds) - 1,
        RANK_MAX=stack.rank_max, RANKS=ranks, ROWS=ROW_TILE, TILES=_ROW_TILES, BLOCK_N=block_n,
        EACH=run // block_n, SPLITS=config.splits(inputs), STAGES=config.expand_stages, ADD=add,
        num_warps=config.expand_warps, num_stages=config.expand_stages,
    )  # fmt: skip
    return y


def _column_run(bounds: tuple[int, ...], most: int) -> int:
    """Neighbouring outputs of one program: the greatest power of two up to `most` that no section cuts."""
    run = 1 << (most.bit_length() - 1)
    while run >= 16:
        if all(bound % run == 0 for bound in bounds):
            return run
        run //= 2
    raise ValueError(f"sections of a matrix must be multiples of 16, got {bounds}")


@triton.jit
def _shrink(x, a, low, rows, starts, slots, ranks, K, stride_x, stride_a, stride_split, stride_low,
            PARTS: tl.constexpr, RANK_MAX: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
            TILE: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
            STAGES: tl.constexpr):  # fmt: skip
    group, tile, split = tl.program_id(0) // TILES, tl.program_id(1), tl.program_id(2)
    # Loads that wait for each other are what such a short program takes: few branches between them.
    slot = tl.load(slots + group)
    begin = tl.load(starts + group) + tl.program_id(0) % TILES * ROWS
    end = tl.load(starts + group + 1)
    if (slot < 0) | (begin >= end):
        return
    part = tile // (RANK_MAX // TILE)
    index = begin + tl.arange(0, ROWS)
    here = index < end
    rank = tl.load(ranks + slot * PARTS + part)
    row = tl.load(rows + index, mask=here, other=0).to(tl.int64)
    if tile % (RANK_MAX // TILE) * TILE >= rank:
        return
    own = tile * TILE + tl.arange(0, TILE)  # rows of the slot's A
    a += slot.to(tl.int64) * stride_a
    sums = tl.zeros((TILE, ROWS), dtype=tl.float32)
    first = split * COLUMNS
    for left in tl.range(first, tl.minimum(first + COLUMNS, K), BLOCK_K, num_stages=STAGES):
        column = left + tl.arange(0, BLOCK_K)
        inside = column < K
        weights = tl.load(a + own[:, None] * K + column[None, :], mask=inside[None, :], other=0.0)
        xs = tl.load(
            x + row[None, :] * stride_x + column[:, None], mask=here[None, :] & inside[:, None], other=0.0
        )
        sums = tl.dot(weights.to(xs.dtype), xs, sums, input_precision="ieee")
    places = low + split * stride_split + index[None, :].to(tl.int64) * stride_low + own[:, None]
    tl.store(places, sums, mask=here[None, :])


@triton.jit
def _expand(low, b, y, rows, starts, slots, ranks, stride_y, stride_b, stride_output, stride_rank, stride_split,
            stride_low, first, second, PARTS: tl.constexpr, RANK_MAX: tl.constexpr, RANKS: tl.constexpr,
            ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr, EACH: tl.constexpr,
            SPLITS: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    group, left = tl.program_id(0) // TILES, tl.program_id(1) * (BLOCK_N * EACH)
    slot = tl.load(slots + group)
    begin = tl.load(starts + group) + tl.program_id(0) % TILES * ROWS
    end = tl.load(starts + group + 1)
    if (slot < 0) | (begin >= end):
        return
    part = (left >= first).to(tl.int32) + (left >= second).to(tl.int32)
    index = begin + tl.arange(0, ROWS)
    here = index < end
    rank = tl.load(ranks + slot * PARTS + part)
    row = tl.load(rows + index, mask=here, other=0).to(tl.int64)
    if ADD & (rank == 0):
        return
    own = tl.arange(0, RANKS)
    held = own < (rank + 7) // 8 * 8  # in eights, so that loads stay wide; a slot is zero past its rank
    b += slot.to(tl.int64) * stride_b + own[None, :] * stride_rank
    low += index[None, :].to(tl.int64) * stride_low + part * RANK_MAX + own[:, None]
    found = tl.zeros((RANKS, ROWS), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        found += tl.load(low + split * stride_split, mask=here[None, :] & (own < rank)[:, None], other=0.0)
    lows = found.to(b.dtype.element_ty)
    for tile in tl.range(0, EACH, num_stages=STAGES):
        column = left + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        weights = tl.load(b + column[:, None] * stride_output, mask=held[None, :], other=0.0)
        places = y + row[None, :] * stride_y + column[:, None]
        sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        if ADD:
            sums = tl.load(places, mask=here[None, :], other=0.0).to(tl.float32)
        sums = tl.dot(weights, lows, sums, input_precision="ieee")
        tl.store(places, sums.to(y.dtype.element_ty), mask=here[None, :])
