"""OmniReduce: an all-reduce that sends only the blocks that are not zero (Fei et al. 2021). Aggregators, numbered
after the ranks, add each block's parts and send the sum to all ranks. The catalogue calls it.

A block that is zero on a rank is not sent by it; one that is zero on all ranks is not sent at all. With density d
on each of n ranks at random, 1 − (1 − d)ⁿ of the blocks come back, so it pays where d is small or zeros agree.
"""

import random
from collections.abc import Sequence

from cumulo.collectives.decide.schedule import (
    CollectiveSchedule,
    CollectiveStep,
    EvenSizes,
    Move,
    Transfer,
)


def omnireduce(
    ranks: int, elements: int, present: Sequence[frozenset[int]], aggregators: int = 1, slots: int = 4
) -> CollectiveSchedule:
    """`present`: of each block, the ranks on which it is not zero. `slots`: blocks that an aggregator has under way
    at a time."""

    def lots(aggregator: int) -> list[list[int]]:
        own = [block for block in range(aggregator, len(present), aggregators) if present[block]]
        return [own[first : first + slots] for first in range(0, len(own), slots)]

    def program(node: int, channel: int) -> Sequence[CollectiveStep]:
        aggregator = ranks + channel
        rounds = lots(channel)
        if node == aggregator:
            return _aggregate(rounds, present, ranks)
        return _contribute(node, aggregator, rounds, present) if node < ranks else []

    return CollectiveSchedule(
        "all_reduce",
        "omnireduce",
        ranks,
        EvenSizes(elements, len(present)),
        program,
        channels=aggregators,
        switches=aggregators,
        present=tuple(present),
    )


def _aggregate(
    rounds: list[list[int]], present: Sequence[frozenset[int]], ranks: int
) -> list[CollectiveStep]:
    """While one lot's sums go out, the parts of the next come in."""
    steps: list[CollectiveStep] = []
    for index in range(len(rounds) + 1):
        out = rounds[index - 1] if index else []
        come = rounds[index] if index < len(rounds) else []
        step = [Transfer(Move.SEND, rank, block) for block in out for rank in range(ranks)]
        step += [Transfer(Move.REDUCE, rank, block) for block in come for rank in sorted(present[block])]
        steps.append(tuple(step))
    return steps


def _contribute(
    rank: int, aggregator: int, rounds: list[list[int]], present: Sequence[frozenset[int]]
) -> list[CollectiveStep]:
    steps: list[CollectiveStep] = []
    for index in range(len(rounds) + 1):
        come = rounds[index - 1] if index else []
        out = [block for block in (rounds[index] if index < len(rounds) else []) if rank in present[block]]
        step = [Transfer(Move.COPY, aggregator, block) for block in come]
        step += [Transfer(Move.SEND, aggregator, block) for block in out]
        steps.append(tuple(step))
    return steps


def random_presence(ranks: int, blocks: int, density: float, seed: int = 0) -> list[frozenset[int]]:
    """Blocks that are not zero with this chance on each rank, for themselves."""
    chance = random.Random(seed)
    return [frozenset(rank for rank in range(ranks) if chance.random() < density) for _ in range(blocks)]
