"""CollectiveSchedule: who sends which chunk to whom, and in which order. The generators of this folder make it;
the checker, the players, the network simulator, the cost model and the drawing read it.

    schedule = ring_all_reduce(ranks=4, elements=1000)
    for step in schedule.steps(rank=0):        # what rank 0 does, one step after another
        for transfer in step:                  # what it starts together
            print(transfer)                    # send to 1: chunk 3, receive-reduce from 3: chunk 2

The rules that every reader follows:

- A buffer is cut into chunks, numbered alike on all ranks; `sizes` has their elements, and some may be empty.
- A rank does its steps in order. The transfers of one step are started together and the step ends when all of them
  have ended. What a step sends is what the chunk was before the step.
- Several parts that arrive for one chunk in one step are added in the order of their ranks, this rank's own part in
  its place, so that ranks which add the same parts get the same bits.
- Channels are independent: each has its own steps and its own messages, and no two touch the same chunk of a rank.
- Between two ranks, messages of a channel arrive in the order they were sent.
- Switches that add (SHARP) have steps like ranks, numbered after them; they begin with nothing, and the
  first part that arrives is copied.

Nothing is listed before it is asked for: a schedule of 16,384 ranks is as small as one of four. Where `symmetry` is
given, the steps of one rank are those of rank 0 with every peer moved (`moved`), so that one rank stands for all.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, TypeAlias, get_args, overload
from zlib import crc32

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "barrier"
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


def busbw_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it: of a buffer, what one rank sends."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if collective in ("broadcast", "reduce", "send_recv") else (ranks - 1) / ranks


class Move(Enum):
    SEND = "send"
    REDUCE = "receive-reduce"  # add what arrives to the chunk
    COPY = "copy"  # put what arrives in the chunk's place


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between this rank and a peer: a chunk, or a run of chunks with consecutive numbers."""

    move: Move
    peer: int
    chunk: int
    count: int = 1

    @property
    def chunks(self) -> range:
        return range(self.chunk, self.chunk + self.count)

    def __str__(self) -> str:
        way = "to" if self.move is Move.SEND else "from"
        which = (
            f"chunk {self.chunk}"
            if self.count == 1
            else f"chunks {self.chunk} to {self.chunk + self.count - 1}"
        )
        return f"{self.move.value} {way} {self.peer}: {which}"


CollectiveStep: TypeAlias = tuple[Transfer, ...]


@dataclass(frozen=True)
class EvenSizes(Sequence[int]):
    """`total` elements cut into `parts`, the first of which have one more where it does not divide."""

    total: int
    parts: int

    def __len__(self) -> int:
        return self.parts

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self.parts))]
        if not -self.parts <= index < self.parts:
            raise IndexError(index)
        whole, rest = divmod(self.total, self.parts)
        return whole + (index % self.parts < rest)


@dataclass(frozen=True)
class CollectiveSchedule:
    collective: Collective
    algorithm: str
    ranks: int
    sizes: Sequence[int]  # elements of each chunk
    program: Callable[[int, int], Sequence[CollectiveStep]]  # of (rank, channel); `steps` calls it
    channels: int = 1
    pieces: int = 1  # chunks of a block, which belongs to a rank; in an all-to-all a chunk belongs to a pair
    root: int = 0  # of broadcast and reduce
    switches: int = 0  # that add: numbered after the ranks
    # The ranks as digits, the most significant first: (n,) a ring of n, (nodes, gpus) two levels, (2, 2, 2) a
    # hypercube. (): ranks differ.
    symmetry: tuple[int, ...] = ()
    # Steps that differ only in their chunks, as (how many, one of them): of (rank, channel). None: each by itself.
    alike: Callable[[int, int], Sequence[tuple[int, CollectiveStep]]] | None = None

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.collective}"

    @property
    def nodes(self) -> int:
        """Ranks and switches."""
        return self.ranks + self.switches

    def steps(self, rank: int, channel: int = 0) -> Sequence[CollectiveStep]:
        return self.program(rank, channel)

    def runs(self, rank: int, channel: int = 0) -> Sequence[tuple[int, CollectiveStep]]:
        """Its steps as (how many, one of them) where only the chunk's number changes from one to the next."""
        if self.alike is not None:
            return self.alike(rank, channel)
        return [(1, step) for step in self.steps(rank, channel)]

    def elements(self, transfer: Transfer) -> int:
        return sum(self.sizes[chunk] for chunk in transfer.chunks)

    @cached_property
    def offsets(self) -> Sequence[int]:
        """Where each chunk begins in a buffer of all chunks, and where the last one ends."""
        return list(accumulate(self.sizes, initial=0))

    @cached_property
    def fingerprint(self) -> int:
        """32 bits that ranks of one collective compare: they must all play the same schedule."""
        what = (
            self.collective,
            self.algorithm,
            self.ranks,
            self.channels,
            self.pieces,
            self.root,
            len(self.sizes),
        )
        return crc32(repr(what).encode())

    def source(self, chunk: int) -> int | None:
        """The rank that has it first; None: all of them have a part of it."""
        if self.collective in ("all_gather", "barrier"):
            return chunk // self.pieces
        if self.collective == "all_to_all":
            return chunk // self.ranks
        return self.root if self.collective == "broadcast" else None

    def destination(self, chunk: int) -> int | None:
        """The rank that must have it last; None: all of them."""
        if self.collective == "reduce_scatter":
            return chunk // self.pieces
        if self.collective == "all_to_all":
            return chunk % self.ranks
        return self.root if self.collective == "reduce" else None

    def contributors(self, chunk: int) -> Collection[int]:
        """The ranks that have a part of it first."""
        source = self.source(chunk)
        return range(self.ranks) if source is None else (source,)

    def moved(self, peer: int, rank: Any) -> Any:
        """The peer of `rank`, or of an array of ranks, where rank 0's is `peer`: digit by digit."""
        answer, place = 0 * rank, 1
        for radix in reversed(self.symmetry):
            digit = (peer // place + rank // place) % radix
            answer, place = answer + digit * place, place * radix
        return answer
