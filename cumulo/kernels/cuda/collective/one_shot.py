"""One-shot collectives over ranks that read each other's memory: every rank reads all partial sums and adds them up
itself. For the small sums of a decoding step: one kernel, one wait, no copy, and it can be captured in a graph.

All ranks add in the order of the ranks, in pairs, so they get the same bits. Must move: every rank's partial sum to
every rank, (ranks - 1) times as much as it holds over the links.

What a rank writes for the others must stay until they have read it. Nobody waits for that: two buffers taken by
turns are enough, because a rank that waits for its peers in one sum has finished reading for the sum before.

Rows may lie on several ranks: data-parallel attention has each sequence's hidden states on one rank, and experts
need those of all. How many rows each rank has is on the device, so a captured graph serves any division of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.collective.peers import PeerMemory, PeerTensor


@triton.jit
def add_in_pairs(x, index, one, two, four, COUNT: tl.constexpr):
    """Take in part number `index` of COUNT, in their order: (its branch so far, the branches of one, two and four
    parts that wait for later ones). After the last part the branch is the sum of all. Those that wait are zeros at
    first. COUNTs that are no powers of two are added one by one."""
    if COUNT == 2 or COUNT == 4 or COUNT == 8:
        if index % 2 == 0:
            one = x
        else:
            x = one + x
            if index % 4 == 1:
                two = x
            else:
                x = two + x
                if index % 8 == 3:
                    four = x
                else:
                    x = four + x
    else:
        x = one + x
        one = x
    return x, one, two, four


_BLOCK = 2048
_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def meet(flags, channel, rank, waits, RANKS: tl.constexpr):
    """Wait until this program's twin on every rank is here. What their earlier kernels wrote is seen after."""
    if waits != 0:
        for step in tl.static_range(1, RANKS):
            peer = (rank + step) % RANKS
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + channel * RANKS + rank
            while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
                pass
        for step in tl.static_range(1, RANKS):
            peer = (rank + step) % RANKS
            ours = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + channel * RANKS + peer
            while tl.atomic_cas(ours, 1, 0, sem="acquire", scope="sys") != 1:
                pass
        tl.debug_barrier()


@triton.jit(do_not_specialize=["waits"])
def _meet(flags, rank, waits, RANKS: tl.constexpr):
    meet(flags, 0, rank, waits, RANKS)


@triton.jit(do_not_specialize=["words"])
def _release(flags, rank, words, RANKS: tl.constexpr, WORDS: tl.constexpr):
    """As if every peer were at every meeting, and had seen that this rank was."""
    word = tl.arange(0, WORDS)
    inside = word < words
    ours = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(ours + word, tl.full((WORDS,), 1, tl.int32), mask=inside, sem="relaxed", scope="sys")
    for step in tl.static_range(1, RANKS):
        theirs = tl.load(flags + (rank + step) % RANKS).to(tl.pointer_type(tl.int32))
        own = inside & (word % RANKS == rank)
        tl.atomic_xchg(theirs + word, tl.zeros((WORDS,), tl.int32), mask=own, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["waits"])
def _sum(flags, partials, out, elements, rank, waits, KIND: tl.constexpr, ADD: tl.constexpr, ROUND: tl.constexpr,
         RANKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    meet(flags, program, rank, waits, RANKS)
    for first in range(program * BLOCK, elements, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < elements
        total = tl.zeros((BLOCK,), tl.float32)
        one, two, four = total, total, total
        for peer in tl.static_range(RANKS):
            partial = tl.load(partials + peer).to(tl.pointer_type(KIND))
            total = tl.load(partial + at, mask=inside, other=0.0).to(tl.float32)
            total, one, two, four = add_in_pairs(total, peer, one, two, four, RANKS)
        if ROUND:
            total = total.to(out.dtype.element_ty).to(tl.float32)
        if ADD:
            total += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gather(slices, out, width, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    row, owner = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(slices + owner).to(tl.pointer_type(out.dtype.element_ty)) + row * width
    x = tl.load(source + column, mask=inside, other=0.0)
    tl.store(out + row * width * RANKS + owner * width + column, x, mask=inside)


@triton.jit
def _embed(token_ids, weight, out, first, rows, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(token_ids + token) - first
    column = tl.arange(0, BLOCK)
    held = (column < size) & (column * 0 + index >= 0) & (column * 0 + index < rows)
    x = tl.load(weight + index.to(tl.int64) * size + column, mask=held, other=0.0)
    tl.store(out + token * size + column, x, mask=column < size)


def meet_all(memory: PeerMemory) -> None:
    """What every rank has launched so far has happened before what is launched after this."""
    _meet[(1,)](memory.flags.addresses, memory.rank, int(memory.waits), RANKS=memory.ranks, num_warps=1)


def release(memory: PeerMemory, only_load: bool = False) -> None:
    """Let kernels go on that wait for a rank which will never come. Whatever they compute is nonsense; to be
    repeated until they have ended. It is loaded before: while a kernel waits, that may be impossible."""
    words = memory.flags.own.numel()
    _release[(1,)](
        memory.flags.addresses, memory.rank, 0 if only_load else words, RANKS=memory.ranks,
        WORDS=triton.next_power_of_2(words), num_warps=4,
    )  # fmt: skip


def sum_partials(
    memory: PeerMemory,
    partial: PeerTensor,
    dtype: torch.dtype,
    out: Tensor,
    add: bool = False,
    rounded: bool = False,
) -> None:
    """`out` becomes the sum over ranks of the numbers of `dtype` that stand first in `partial`; with `add`, onto
    what it holds. `rounded`: to its dtype before it is added, as a product that is stored first."""
    elements = out.numel()
    if elements == 0:
        return
    programs = min(memory.channels, triton.cdiv(elements, _BLOCK))
    _sum[(programs,)](
        memory.flags.addresses, partial.addresses, out, elements, memory.rank, int(memory.waits),
        KIND=triton_type(dtype), ADD=add, ROUND=rounded, RANKS=memory.ranks, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def gather_columns(memory: PeerMemory, columns: PeerTensor, out: Tensor) -> Tensor:
    """Rows [R, ranks · width] of slices [R, width]. All ranks have gathered when the next kernel begins."""
    meet_all(memory)
    rows, width = len(out), out.shape[1] // memory.ranks
    if rows:
        _gather[(rows, memory.ranks, triton.cdiv(width, _BLOCK))](
            columns.addresses, out, width, RANKS=memory.ranks, BLOCK=_BLOCK, num_warps=4
        )
    meet_all(memory)
    return out


def embed_slice(token_ids: Tensor, weight: Tensor, first: int, out: Tensor) -> None:
    """The rows of the vocabulary that this rank holds, from token `first` on; zeros for the others' tokens."""
    rows, size = weight.shape
    if len(token_ids):
        _embed[(len(token_ids),)](
            token_ids, weight, out, first, rows, size, BLOCK=triton.next_power_of_2(size), num_warps=4
        )


def triton_type(dtype: torch.dtype) -> tl.dtype:
    return _TRITON_TYPES[dtype]


_WORDS = ["starts", "owners"]  # slices of a buffer, which begin anywhere


@triton.jit(do_not_specialize=["slice"], do_not_specialize_on_alignment=_WORDS)
def _gather_rows(
    rows, starts, out, size, slice, DATA_RANKS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < size
    target = out + row.to(tl.int64) * size + column
    for data_rank in tl.static_range(DATA_RANKS):
        begin, end = tl.load(starts + data_rank), tl.load(starts + data_rank + 1)
        if (row >= begin) & (row < end):
            source = tl.load(rows + data_rank * SLICES + slice).to(tl.pointer_type(out.dtype.element_ty))
            source += (row - begin).to(tl.int64) * size
            tl.store(target, tl.load(source + column, mask=inside, other=0.0), mask=inside)
    if row >= tl.load(starts + DATA_RANKS):  # fills a shape up: what it holds must only be a number
        tl.store(target, tl.zeros((BLOCK,), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["data_rank"], do_not_specialize_on_alignment=_WORDS)
def _sum_rows(
    partials, starts, out, size, data_rank, KIND: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < size
    place = tl.load(starts + data_rank) + row
    if place < tl.load(starts + data_rank + 1):
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
    """out[starts[h] : starts[h + 1]] = the first rows of data-parallel rank h with this slice; zeros beyond."""
    meet_all(memory)
    data_ranks, size = len(starts) - 1, out.shape[1]
    if len(out):
        _gather_rows[(len(out),)](
            rows.addresses, starts, out, size, slice, DATA_RANKS=data_ranks, SLICES=memory.ranks // data_ranks,
            BLOCK=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
    return out


def sum_rows(
    memory: PeerMemory, partial: PeerTensor, dtype: torch.dtype, starts: Tensor, data_rank: int, out: Tensor
) -> None:
    """Onto the rows of `out` that are this data-parallel rank's: the sum over ranks of their rows of `partial`,
    which has the rows of all of them, as numbers of `dtype`."""
    meet_all(memory)
    size = out.shape[1]
    if len(out):
        _sum_rows[(len(out),)](
            partial.addresses, starts, out, size, data_rank, KIND=triton_type(dtype), RANKS=memory.ranks,
            BLOCK=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip


def gather_owned(
    memory: PeerMemory, rows: PeerTensor, owners: Tensor, data_ranks: int, slice: int, out: Tensor
) -> Tensor:
    """out[r] = row r of data-parallel rank owners[r] with this slice. All have read when the next kernel begins."""
    meet_all(memory)
    if len(out):
        _gather_owned[(len(out),)](
            rows.addresses, owners, out, out.shape[1], slice, SLICES=memory.ranks // data_ranks,
            BLOCK=triton.next_power_of_2(out.shape[1]), num_warps=4,
        )  # fmt: skip
    meet_all(memory)
    return out
