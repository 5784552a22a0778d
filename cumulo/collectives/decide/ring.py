"""Rings: every rank sends to the next and receives from the one before. Bandwidth-optimal, n − 1 steps a round
(Patarasuk and Yuan 2009). The catalogue calls it.

`orders` has one order of the ranks for each channel, so that channels can use different links (multi-ring over
rails); without it all channels go round in the order of the ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from cumulo.collectives.decide.schedule import (
    Collective,
    CollectiveSchedule,
    CollectiveStep,
    EvenSizes,
    Move,
    Transfer,
)

Orders = Sequence[Sequence[int]]


def ring_all_reduce(
    ranks: int, elements: int, channels: int = 1, rounds: int = 1, orders: Orders = (), name: str = "ring"
) -> CollectiveSchedule:
    """A reduce-scatter and an all-gather. `rounds`: the buffer passes in so many runs, each cut by ranks and
    channels, so that a chunk stays small."""
    pieces = channels * rounds
    sizes = EvenSizes(elements, ranks * pieces)
    return rings("all_reduce", (Move.REDUCE, Move.COPY), ranks, sizes, channels, pieces, orders, name)


def rings(
    collective: Collective,
    moves: Sequence[Move],
    ranks: int,
    sizes: Sequence[int],
    channels: int,
    pieces: int,
    orders: Orders = (),
    name: str = "ring",
) -> CollectiveSchedule:
    """A round of each of `moves` for every piece; `sizes`: of each chunk, `pieces` of them to a rank."""
    turns = orders or [range(ranks)] * channels

    @lru_cache(maxsize=channels)
    def places(channel: int) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(turns[channel])}

    def rounds(rank: int, channel: int, steps: int) -> Iterator[list[CollectiveStep]]:
        for piece in range(channel, pieces, channels):
            for move in moves:
                place = places(channel)[rank]
                yield ring_round(
                    turns[channel], place, move, lambda member, at=piece: member * pieces + at, steps=steps  # type: ignore[misc]
                )  # fmt: skip

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        return [step for steps in rounds(rank, channel, ranks - 1) for step in steps]

    def alike(rank: int, channel: int) -> Sequence[tuple[int, CollectiveStep]]:
        return [(ranks - 1, steps[0]) for steps in rounds(rank, channel, 1)]

    symmetry = () if orders else (ranks,)
    return CollectiveSchedule(
        collective, name, ranks, sizes, program, channels, pieces, symmetry=symmetry, alike=alike
    )


def ring_round(
    order: Sequence[int],
    place: int,
    move: Move,
    chunk: Callable[[int], int],
    count: int = 1,
    steps: int | None = None,
) -> list[CollectiveStep]:
    """The n − 1 steps, or the first few, of the rank at a place of the ring. `chunk`: the first of the `count`
    chunks that belong to a rank. A copy starts at the rank that it belongs to; a sum ends there, so it starts one
    place further."""
    n, behind = len(order), 1 if move is Move.REDUCE else 0
    after, before = order[(place + 1) % n], order[(place - 1) % n]
    return [
        (
            Transfer(Move.SEND, after, chunk(order[(place - behind - step) % n]), count),
            Transfer(move, before, chunk(order[(place - behind - step - 1) % n]), count),
        )
        for step in range(n - 1 if steps is None else steps)
    ]
