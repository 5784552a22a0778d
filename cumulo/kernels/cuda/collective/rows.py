"""Rows that lie on several ranks: data-parallel attention has each sequence's hidden states on one rank, and
experts need those of all. Every rank reads the others' memory in place; how many rows each has is on the device, so
a captured graph serves any division of them.

Must move: to every rank the rows of all others, and back one partial sum of each rank for each row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.collective.in_pairs import add_in_pairs
from cumulo.kernels.cuda.collective.one_shot import meet_all, triton_type
from cumulo.kernels.cuda.collective.peers import PeerMemory, PeerTensor

_WORDS = ["starts", "owners"]  # slices of a buffer, which begin anywhere


@triton.jit(do_not_specialize=["slice"], do_not_specialize_on_alignment=_WORDS)
def _gather_rows(
    rows, starts, out, size, slice, HOMES: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < size
    target = out + row.to(tl.int64) * size + column
    for home in tl.static_range(HOMES):
        begin, end = tl.load(starts + home), tl.load(starts + home + 1)
        if (row >= begin) & (row < end):
            source = tl.load(rows + home * SLICES + slice).to(tl.pointer_type(out.dtype.element_ty))
            source += (row - begin).to(tl.int64) * size
            tl.store(target, tl.load(source + column, mask=inside, other=0.0), mask=inside)
    if row >= tl.load(starts + HOMES):  # fills a shape up: what it holds must only be a number
        tl.store(target, tl.zeros((BLOCK,), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["home"], do_not_specialize_on_alignment=_WORDS)
def _sum_rows(
    partials, starts, out, size, home, KIND: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < size
    place = tl.load(starts + home) + row
    if place < tl.load(starts + home + 1):
        total = tl.zeros((BLOCK,), tl.float32)
        one, two, four = total, total, total
        for peer in tl.static_range(RANKS):
            partial = tl.load(partials + peer).to(tl.pointer_type(KIND)) + place.to(tl.int64) * size
            total = tl.load(partial + column, mask=inside, other=0.0).to(tl.float32)
            total, one, two, four = add_in_pairs(total, peer, one, two, four, RANKS)
        target = out + row.to(tl.int64) * size + column
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slice"], do_not_specialize_on_alignment=_WORDS)
def _gather_owned(rows, owners, out, size, slice, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < size
    owner = tl.load(owners + row) * SLICES + slice
    source = tl.load(rows + owner).to(tl.pointer_type(out.dtype.element_ty)) + row.to(tl.int64) * size
    x = tl.load(source + column, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * size + column, x, mask=inside)


def gather_rows(memory: PeerMemory, rows: PeerTensor, starts: Tensor, slice: int, out: Tensor) -> Tensor:
    """out[starts[h] : starts[h + 1]] = the first rows of the rank of home h with this slice; zeros beyond."""
    meet_all(memory)
    homes, size = len(starts) - 1, out.shape[1]
    if len(out):
        _gather_rows[(len(out),)](
            rows.addresses, starts, out, size, slice, HOMES=homes, SLICES=memory.ranks // homes,
            BLOCK=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
    return out


def sum_rows(
    memory: PeerMemory, partial: PeerTensor, dtype: torch.dtype, starts: Tensor, home: int, out: Tensor
) -> None:
    """Onto the rows of `out` that are this home's: the sum over ranks of their rows of `partial`, which has the
    rows of all homes, as numbers of `dtype`."""
    meet_all(memory)
    size = out.shape[1]
    if len(out):
        _sum_rows[(len(out),)](
            partial.addresses, starts, out, size, home, KIND=triton_type(dtype), RANKS=memory.ranks,
            BLOCK=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip


def gather_owned(
    memory: PeerMemory, rows: PeerTensor, owners: Tensor, homes: int, slice: int, out: Tensor
) -> Tensor:
    """out[r] = row r of the rank of home owners[r] with this slice. All have read when the next kernel begins."""
    meet_all(memory)
    if len(out):
        _gather_owned[(len(out),)](
            rows.addresses, owners, out, out.shape[1], slice, SLICES=memory.ranks // homes,
            BLOCK=triton.next_power_of_2(out.shape[1]), num_warps=4,
        )  # fmt: skip
    meet_all(memory)
    return out
