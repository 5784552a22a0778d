"""Messages from one rank's GPU into another's memory, for pipelines: hidden states from a stage to the next,
drawn tokens from the last stage to the first. The receiver waits inside a kernel, so both ends can be captured
in graphs.

The sender writes into the receiver's memory, which costs less over a link than to read there. A passage has room
for a few messages. Each end counts: the sender goes on when the message that lay in the same place has been
taken, the receiver when its message has arrived. Both launch as many programs, and each has a twin and counts
of its own.

Must move: every number once in and once out.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.collective.peers import PeerMemory, PeerTensor, aligned
from cumulo.kernels.cuda.sampling.sample import COLUMNS, POSITION, SLOT

_BLOCK = 2048
_PROGRAMS = 16  # few: where ranks share a GPU they wait on multiprocessors that others need
_NEVER = 1 << 62  # a count that no message reaches


@dataclass(frozen=True, slots=True)
class PeerPassage:
    """This rank's two ends: it may send to one peer and receive from another."""

    memory: PeerMemory
    inbox: PeerTensor  # [places, words]: of messages to this rank
    arrived: PeerTensor  # [programs] int64: messages that the sender has written here
    taken: PeerTensor  # [programs] int64: of messages this rank sent, those that the receiver has taken
    sent: Tensor  # [programs] int64
    received: Tensor

    @property
    def places(self) -> int:
        return self.inbox.own.shape[0]

    def let_go(self, count: int = _NEVER) -> None:
        """Marks every message as come and gone, so that kernels that wait for a dead rank end, with nonsense."""
        for counts in (self.arrived.own, self.taken.own):
            counts.fill_(count)


def make_passage(memory: PeerMemory, places: int, words: int, dtype: torch.dtype) -> PeerPassage:
    """All ranks of the memory make it. `words`: of the longest message."""
    inbox = memory.carve((places, words), dtype)
    arrived, taken = (memory.carve((_PROGRAMS,), torch.int64) for _ in range(2))
    # By the kernel that `let_go` needs: while another one waits, loading it may be impossible.
    sent, received = (torch.empty_like(arrived.own).fill_(0) for _ in range(2))
    return PeerPassage(memory, inbox, arrived, taken, sent, received)


def passage_bytes(places: int, words: int, dtype: torch.dtype) -> int:
    return aligned(places * words * dtype.itemsize) + 2 * aligned(_PROGRAMS * 8)


@triton.jit
def _await(counts, rank, program, least):
    """Until this rank's count has reached `least`; what was written before it was raised is seen after."""
    count = tl.load(counts + rank).to(tl.pointer_type(tl.int64)) + program
    while tl.atomic_add(count, 0, sem="acquire", scope="sys") < least:
        pass
    tl.debug_barrier()


@triton.jit
def _raise(counts, peer, program, count):
    """Tell a peer of what this program has done so far."""
    tl.debug_barrier()
    theirs = tl.load(counts + peer).to(tl.pointer_type(tl.int64)) + program
    tl.atomic_xchg(theirs, count, sem="release", scope="sys")


@triton.jit(do_not_specialize=["elements", "rank", "peer", "waits"])
def _pass(local, inbox, awaited, raised, done, elements, words, rank, peer, waits, PLACES: tl.constexpr,
          RECEIVE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A message from `local` into the peer's inbox or, with RECEIVE, from this rank's into it. `done`: how many
    there were so far; `awaited` and `raised`: what the other end counts, and what it is told."""
    if waits != 0:
        program = tl.program_id(0)
        count = tl.load(done + program)
        _await(awaited, rank, program, count + 1 if RECEIVE else count - PLACES + 1)
        owner = rank if RECEIVE else peer
        place = tl.load(inbox + owner).to(tl.pointer_type(local.dtype.element_ty)) + count % PLACES * words
        for first in range(program * BLOCK, elements, tl.num_programs(0) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < elements
            if RECEIVE:
                tl.store(local + at, tl.load(place + at, mask=inside, other=0.0), mask=inside)
            else:
                tl.store(place + at, tl.load(local + at, mask=inside, other=0.0), mask=inside)
        _raise(raised, peer, program, count + 1)
        tl.store(done + program, count + 1)


@triton.jit(
    do_not_specialize=["rows", "rank", "peer", "waits"], do_not_specialize_on_alignment=["draws", "tokens"]
)
def _send_tokens(draws, tokens, token_stride, inbox, arrived, taken, sent, rows, words, rank, peer, waits,
                 COLUMNS: tl.constexpr, SLOT: tl.constexpr, POSITION: tl.constexpr, PLACES: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """A message: how many draws; then slot, position and token of each."""
    if waits != 0:
        count = tl.load(sent)
        _await(taken, rank, 0, count - PLACES + 1)
        target = tl.load(inbox + peer).to(tl.pointer_type(tl.int32)) + count % PLACES * words
        tl.store(target, rows)
        for first in range(0, rows, BLOCK):
            row = first + tl.arange(0, BLOCK)
            inside = row < rows
            slot = tl.load(draws + row * COLUMNS + SLOT, mask=inside, other=-1)
            position = tl.load(draws + row * COLUMNS + POSITION, mask=inside, other=0)
            held = slot >= 0
            token = tl.load(tokens + slot.to(tl.int64) * token_stride + position, mask=held, other=0)
            tl.store(target + 1 + 3 * row, slot, mask=inside)
            tl.store(target + 2 + 3 * row, position, mask=inside)
            tl.store(target + 3 + 3 * row, token, mask=inside)
        _raise(arrived, peer, 0, count + 1)
        tl.store(sent, count + 1)


@triton.jit(do_not_specialize=["rank", "peer", "waits"], do_not_specialize_on_alignment=["tokens"])
def _take_tokens(tokens, token_stride, inbox, arrived, taken, received, words, rank, peer, waits,
                 PLACES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    if waits != 0:
        count = tl.load(received)
        _await(arrived, rank, 0, count + 1)
        source = tl.load(inbox + rank).to(tl.pointer_type(tl.int32)) + count % PLACES * words
        rows = tl.load(source)
        for first in range(0, rows, BLOCK):
            row = first + tl.arange(0, BLOCK)
            slot = tl.load(source + 1 + 3 * row, mask=row < rows, other=-1)
            held = slot >= 0
            position = tl.load(source + 2 + 3 * row, mask=held, other=0)
            token = tl.load(source + 3 + 3 * row, mask=held, other=0)
            tl.store(tokens + slot.to(tl.int64) * token_stride + position, token, mask=held)
        _raise(taken, peer, 0, count + 1)
        tl.store(received, count + 1)


def send(passage: PeerPassage, source: Tensor, peer: int) -> None:
    """A contiguous tensor, to the rank of this number in the passage's memory."""
    _move(passage, source, passage.taken, passage.arrived, passage.sent, peer, receive=False)


def receive(passage: PeerPassage, target: Tensor, peer: int) -> None:
    """The next message of that rank, whose sizes are the target's."""
    _move(passage, target, passage.arrived, passage.taken, passage.received, peer, receive=True)


def _move(
    passage: PeerPassage, local: Tensor, awaited: PeerTensor, raised: PeerTensor, done: Tensor, peer: int,
    receive: bool,
) -> None:  # fmt: skip
    memory, inbox = passage.memory, passage.inbox
    _pass[(_PROGRAMS,)](
        local, inbox.addresses, awaited.addresses, raised.addresses, done, local.numel(), inbox.own.shape[1],
        memory.rank, peer, int(memory.waits), PLACES=passage.places, RECEIVE=receive, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def token_words(draws: int) -> int:
    """The words of a message about this many draws."""
    return 1 + 3 * draws


def send_tokens(passage: PeerPassage, draws: Tensor, tokens: Tensor, peer: int) -> None:
    """What stands in `tokens` at the slots and positions of draws [R, COLUMNS]."""
    memory, inbox = passage.memory, passage.inbox
    _send_tokens[(1,)](
        draws, tokens, tokens.stride(0), inbox.addresses, passage.arrived.addresses, passage.taken.addresses,
        passage.sent, len(draws), inbox.own.shape[1], memory.rank, peer, int(memory.waits), COLUMNS=COLUMNS,
        SLOT=SLOT, POSITION=POSITION, PLACES=passage.places, BLOCK=256, num_warps=4,
    )  # fmt: skip


def take_tokens(passage: PeerPassage, tokens: Tensor, peer: int) -> None:
    """Enter the tokens of the next message where it says."""
    memory, inbox = passage.memory, passage.inbox
    _take_tokens[(1,)](
        tokens, tokens.stride(0), inbox.addresses, passage.arrived.addresses, passage.taken.addresses,
        passage.received, inbox.own.shape[1], memory.rank, peer, int(memory.waits), PLACES=passage.places,
        BLOCK=256, num_warps=4,
    )  # fmt: skip
