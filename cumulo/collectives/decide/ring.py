"""Rings: every rank sends to the next and receives from the one before. Bandwidth-optimal, n − 1 steps a round
(Patarasuk and Yuan 2009). The catalogue calls it.

`orders` has one order of the ranks for each channel, so that channels can use different links (multi-ring over
rails); without it all channels go round in the order of the ranks.
"""

from collections.abc import Sequence
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
    ring = _Rings(ranks, pieces, channels, orders)

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        steps: list[CollectiveStep] = []
        for piece in range(channel, pieces, channels):
            steps += ring.round(rank, channel, piece, Move.REDUCE, behind=1)
            steps += ring.round(rank, channel, piece, Move.COPY, behind=0)
        return steps

    sizes = EvenSizes(elements, ranks * pieces)

    def alike(rank: int, channel: int) -> Sequence[tuple[int, CollectiveStep]]:
        return [
            (ranks - 1, ring.step(rank, channel, piece, move))
            for piece in range(channel, pieces, channels)
            for move in (Move.REDUCE, Move.COPY)
        ]

    symmetry = () if orders else (ranks,)
    return CollectiveSchedule(
        "all_reduce", name, ranks, sizes, program, channels, pieces, symmetry=symmetry, alike=alike
    )


def ring_reduce_scatter(
    ranks: int, sizes: Sequence[int], channels: int = 1, pieces: int = 1
) -> CollectiveSchedule:
    """`sizes`: of each chunk, `pieces` of them to a rank."""
    return _one_round("reduce_scatter", Move.REDUCE, 1, ranks, sizes, channels, pieces)


def ring_all_gather(
    ranks: int, sizes: Sequence[int], channels: int = 1, pieces: int = 1
) -> CollectiveSchedule:
    return _one_round("all_gather", Move.COPY, 0, ranks, sizes, channels, pieces)


def _one_round(
    collective: Collective,
    move: Move,
    behind: int,
    ranks: int,
    sizes: Sequence[int],
    channels: int,
    pieces: int,
) -> CollectiveSchedule:
    ring = _Rings(ranks, pieces, channels)

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        return [
            step
            for piece in range(channel, pieces, channels)
            for step in ring.round(rank, channel, piece, move, behind=behind)
        ]

    def alike(rank: int, channel: int) -> list[tuple[int, CollectiveStep]]:
        return [
            (ranks - 1, ring.step(rank, channel, piece, move)) for piece in range(channel, pieces, channels)
        ]

    return CollectiveSchedule(
        collective, "ring", ranks, sizes, program, channels, pieces, symmetry=(ranks,), alike=alike
    )


class _Rings:
    def __init__(self, ranks: int, pieces: int, channels: int, orders: Orders = ()) -> None:
        self._ranks, self._pieces = ranks, pieces
        self._orders = orders or [range(ranks)] * channels
        self._places = lru_cache(maxsize=channels)(self._place_of_each)

    def _place_of_each(self, channel: int) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self._orders[channel])}

    def step(self, rank: int, channel: int, piece: int, move: Move) -> CollectiveStep:
        """One for all of a round."""
        return (self.round(rank, channel, piece, move, behind=0, steps=1) or [()])[0]

    def round(
        self, rank: int, channel: int, piece: int, move: Move, behind: int, steps: int | None = None
    ) -> list[CollectiveStep]:
        """n − 1 steps. In the first a rank sends the block that belongs to the rank `behind` places before it."""
        n, pieces = self._ranks, self._pieces
        count = n - 1 if steps is None else steps
        order, place = self._orders[channel], self._places(channel)[rank]
        after, before = order[(place + 1) % n], order[(place - 1) % n]
        return [
            (
                Transfer(Move.SEND, after, order[(place - behind - step) % n] * pieces + piece),
                Transfer(move, before, order[(place - behind - step - 1) % n] * pieces + piece),
            )
            for step in range(count)
        ]
