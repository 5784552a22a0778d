"""Exchanges at growing or shrinking distance: recursive doubling, halving-doubling, butterfly, one-shot, two-shot
and Bruck's all-gather. Few steps, with partners that are far apart. The catalogue calls it.

One picture covers them: a rank's number is written in digits, and in each phase ranks that differ in one digit
exchange. Digits of base 2 give halving-doubling, one digit of base n gives two-shot, the prime factors of n give
the butterfly, which needs no power of two.
"""

from collections.abc import Sequence
from itertools import pairwise

from cumulo.collectives.decide.schedule import (
    Collective,
    CollectiveSchedule,
    CollectiveStep,
    EvenSizes,
    Move,
    Transfer,
)


def recursive_doubling_all_reduce(ranks: int, elements: int) -> CollectiveSchedule:
    """log₂ n exchanges of the whole buffer: the fewest steps, the most bytes. Ranks above the last power of two
    first give their part to a partner, and get the result from it (Thakur, Rabenseifner and Gropp 2005)."""
    core = 1 << (ranks.bit_length() - 1)

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        steps: list[CollectiveStep] = []
        distance = 1
        while distance < core:
            peer = rank ^ distance
            steps.append((Transfer(Move.SEND, peer, 0), Transfer(Move.REDUCE, peer, 0)))
            distance *= 2
        return _folded(rank, ranks, core, 1, steps)

    return CollectiveSchedule(
        "all_reduce",
        "recursive-doubling",
        ranks,
        EvenSizes(elements, 1),
        program,
        symmetry=_hypercube(ranks, core),
    )


def halving_doubling_all_reduce(ranks: int, elements: int) -> CollectiveSchedule:
    """A reduce-scatter that halves what is exchanged in each step, and an all-gather back (Rabenseifner 2004): the
    bytes of a ring in 2 log₂ n steps."""
    core = 1 << (ranks.bit_length() - 1)
    base = (2,) * (core.bit_length() - 1)

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        moves = (Move.REDUCE, Move.COPY) if rank < core else ()
        steps = [step for move in moves for step in _exchange(rank, base, move)]
        return _folded(rank, ranks, core, core, steps)

    return CollectiveSchedule(
        "all_reduce",
        "halving-doubling",
        ranks,
        EvenSizes(elements, core),
        program,
        symmetry=_hypercube(ranks, core),
    )


def butterfly(
    collective: Collective,
    ranks: int,
    sizes: Sequence[int],
    factors: Sequence[int] | None = None,
    name: str = "butterfly",
) -> CollectiveSchedule:
    """A reduce-scatter or an all-gather over the prime factors of n, one phase for each; both are an all-reduce.
    With n as the only factor it is two-shot: every rank adds its own share of all buffers, then sends it to all."""
    base = tuple(factor for factor in factors or prime_factors(ranks) if factor > 1)

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        scatters = [] if collective == "all_gather" else _exchange(rank, base, Move.REDUCE)
        gathers = [] if collective == "reduce_scatter" else _exchange(rank, base, Move.COPY)
        return [*scatters, *gathers]

    return CollectiveSchedule(collective, name, ranks, sizes, program, symmetry=base or (1,))


def one_shot_all_reduce(ranks: int, elements: int) -> CollectiveSchedule:
    """Every rank sends its whole buffer to all others, and adds all of them itself: one step."""
    return CollectiveSchedule(
        "all_reduce",
        "one-shot",
        ranks,
        EvenSizes(elements, 1),
        lambda rank, channel: _one_step(rank, ranks, Move.REDUCE),
        symmetry=(ranks,),
    )


def bruck_all_gather(ranks: int, sizes: Sequence[int]) -> CollectiveSchedule:
    """⌈log₂ n⌉ steps for any n: what a rank has doubles in each (Bruck et al. 1997)."""
    return CollectiveSchedule(
        "all_gather",
        "bruck",
        ranks,
        sizes,
        lambda rank, channel: _doubling(rank, ranks),
        symmetry=(ranks,),
    )


def dissemination_barrier(ranks: int) -> CollectiveSchedule:
    """⌈log₂ n⌉ steps of empty messages; then every rank has heard of all (Hensgen, Finkel and Manber 1988)."""
    return CollectiveSchedule(
        "barrier",
        "dissemination",
        ranks,
        EvenSizes(0, ranks),
        lambda rank, channel: _doubling(rank, ranks),
        symmetry=(ranks,),
    )


def prime_factors(number: int) -> list[int]:
    """The large ones first: the first phase moves the most bytes, and does so in the fewest steps."""
    found: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return sorted([*found, number] if number > 1 else found, reverse=True)


def _exchange(rank: int, base: Sequence[int], move: Move) -> list[CollectiveStep]:
    """Phase by phase: ranks that share their first digits share a run of chunks. To reduce, from the most
    significant digit on, each takes its part of it from the others; to copy, the other way round, each gives its
    part to them."""
    steps: list[CollectiveStep] = []
    phases = _phases(rank, base)
    for first, span, radix in phases if move is Move.REDUCE else reversed(phases):
        own, offset = (rank - first) // span, (rank - first) % span
        mine = first + own * span
        others = [first + digit * span for digit in range(radix) if digit != own]  # where their parts begin
        sends = [(one + offset, one if move is Move.REDUCE else mine) for one in others]
        takes = [(one + offset, mine if move is Move.REDUCE else one) for one in others]
        steps.append(
            (
                *(Transfer(Move.SEND, peer, chunk, span) for peer, chunk in sends),
                *(Transfer(move, peer, chunk, span) for peer, chunk in takes),
            )
        )
    return steps


def _phases(rank: int, base: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first chunk of the run that is shared, chunks that each takes of it, how many share it)."""
    spans = [1]
    for radix in reversed(base):
        spans.insert(0, spans[0] * radix)
    return [
        (rank - rank % whole, span, radix) for (whole, span), radix in zip(pairwise(spans), base, strict=True)
    ]


def _folded(
    rank: int, ranks: int, core: int, chunks: int, steps: list[CollectiveStep]
) -> list[CollectiveStep]:
    if rank >= core:
        peer = rank - core
        return [(Transfer(Move.SEND, peer, 0, chunks),), (Transfer(Move.COPY, peer, 0, chunks),)]
    if rank + core < ranks:
        peer = rank + core
        return [(Transfer(Move.REDUCE, peer, 0, chunks),), *steps, (Transfer(Move.SEND, peer, 0, chunks),)]
    return steps


def _hypercube(ranks: int, core: int) -> tuple[int, ...]:
    return () if ranks != core else (2,) * (core.bit_length() - 1) or (1,)


def _one_step(rank: int, ranks: int, move: Move) -> list[CollectiveStep]:
    peers = [(rank + away) % ranks for away in range(1, ranks)]
    sends = [Transfer(Move.SEND, peer, 0) for peer in peers]
    return [(*sends, *(Transfer(move, peer, 0) for peer in reversed(peers)))] if peers else []


def _doubling(rank: int, ranks: int) -> list[CollectiveStep]:
    """A rank has the `known` chunks from its own on; it sends them back, and gets those that follow."""
    steps: list[CollectiveStep] = []
    known = 1
    while known < ranks:
        count = min(known, ranks - known)
        back, ahead = (rank - known) % ranks, (rank + known) % ranks
        sends = [Transfer(Move.SEND, back, *run) for run in _runs(rank, count, ranks)]
        takes = [Transfer(Move.COPY, ahead, *run) for run in _runs(ahead, count, ranks)]
        steps.append((*sends, *takes))
        known += count
    return steps


def _runs(first: int, count: int, ranks: int) -> list[tuple[int, int]]:
    """`count` chunks from `first` on, round the end."""
    if first + count <= ranks:
        return [(first, count)]
    return [(first, ranks - first), (0, first + count - ranks)]
