"""All-reduce of larger tensors over ranks that read each other's memory, in place and in one kernel: two-shot and
ring. The small ones of a decoding step are in one_shot.py.

Two-shot: a rank adds up its share of every rank's tensor and writes the sum to all; (ranks - 1) / ranks of the
tensor goes out twice. Ring: shares go round, added up on the first round and copied on the second, and a rank talks
to two neighbours only; the same bytes in 2 (ranks - 1) steps (Patarasuk and Yuan 2009). `collectives/decide` has
both as schedules. Sums are in float32, rounded once (two-shot, in the order of the ranks) or at every step (ring).
"""

import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.collective.one_shot import meet, triton_type
from cumulo.kernels.cuda.collective.peers import PeerMemory, PeerTensor

_BLOCK = 2048


@triton.jit(do_not_specialize=["waits", "elements"])
def _two_shot(
    flags, tensors, elements, rank, waits, KIND: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    meet(flags, program, rank, waits, RANKS)
    share = tl.cdiv(elements, RANKS)
    end = tl.minimum((rank + 1) * share, elements)
    for first in range(rank * share + program * BLOCK, end, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(RANKS):
            theirs = tl.load(tensors + peer).to(tl.pointer_type(KIND))
            total += tl.load(theirs + at, mask=inside, other=0.0).to(tl.float32)
        for peer in tl.static_range(RANKS):  # nobody else reads this share of any tensor
            theirs = tl.load(tensors + peer).to(tl.pointer_type(KIND))
            tl.store(theirs + at, total.to(KIND), mask=inside)
    tl.debug_barrier()  # every thread has written before the others are told
    meet(flags, program, rank, waits, RANKS)


@triton.jit
def _pass_on(flags, channel, rank, waits, RANKS: tl.constexpr):
    """Tell the right neighbour that this program is done so far, and wait until the left one says so."""
    tl.debug_barrier()
    if waits != 0:
        right, left = (rank + 1) % RANKS, (rank + RANKS - 1) % RANKS
        theirs = tl.load(flags + right).to(tl.pointer_type(tl.int32)) + channel * RANKS + rank
        while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
            pass
        ours = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + channel * RANKS + left
        while tl.atomic_cas(ours, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["waits", "elements"])
def _ring(
    flags, tensors, elements, rank, waits, KIND: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    share = tl.cdiv(elements, RANKS)
    own = tl.load(tensors + rank).to(tl.pointer_type(KIND))
    left = tl.load(tensors + (rank + RANKS - 1) % RANKS).to(tl.pointer_type(KIND))
    meet(flags, program, rank, waits, RANKS)
    for step in range(2 * RANKS - 2):
        adds = step < RANKS - 1
        # What the left neighbour had in the step before: partial sums on the first round, then sums.
        chunk = (rank + 2 * RANKS - 1 - step) % RANKS
        end = tl.minimum((chunk + 1) * share, elements)
        if step > 0:
            _pass_on(flags, program, rank, waits, RANKS)
        for first in range(chunk * share + program * BLOCK, end, tl.num_programs(0) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < end
            # What a neighbour wrote a moment ago must not come from this multiprocessor's cache.
            came = tl.load(left + at, mask=inside, other=0.0, volatile=True).to(tl.float32)
            if adds:
                came += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(own + at, came.to(KIND), mask=inside)
    tl.debug_barrier()
    meet(flags, program, rank, waits, RANKS)


_KERNELS = {"two_shot": _two_shot, "ring": _ring}


def all_reduce(memory: PeerMemory, tensor: PeerTensor, algorithm: str = "two_shot") -> Tensor:
    """The sum over ranks in the place of every rank's own; `algorithm`: two_shot or ring."""
    own = tensor.own
    if own.numel():
        programs = min(memory.channels, triton.cdiv(own.numel(), _BLOCK * memory.ranks))
        _KERNELS[algorithm][(programs,)](
            memory.flags.addresses, tensor.addresses, own.numel(), memory.rank, int(memory.waits),
            KIND=triton_type(own.dtype), RANKS=memory.ranks, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return own
