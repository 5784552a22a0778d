"""Switches and aggregators that add: SwitchML and OmniReduce. They are numbered after the ranks.

SwitchML (Sapio et al. 2021): a switch adds packets in a pool of slots. A slot's answer is also the permission to
use the slot again, for the packet that is a pool further on, so the switch needs no more memory than its pool.

OmniReduce (Fei et al. 2021) sends only the blocks that are not zero: one that is zero on a rank is not sent by it,
one that is zero on all ranks is not sent at all. With density d on each of n ranks at random, 1 − (1 − d)ⁿ of the
blocks come back, so it pays where d is small or zeros agree.
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


def switchml(ranks: int, elements: int, packets: int, slots: int = 1) -> CollectiveSchedule:
    """Packets of the buffer through a pool of slots, each a channel: no packet lost."""
    switch = ranks

    def program(node: int, slot: int) -> Sequence[CollectiveStep]:
        steps: list[CollectiveStep] = []
        for packet in range(slot, slots * packets, slots):
            if node == switch:
                steps.append(tuple(Transfer(Move.REDUCE, rank, packet) for rank in range(ranks)))
                steps.append(tuple(Transfer(Move.SEND, rank, packet) for rank in range(ranks)))
            else:
                steps.append((Transfer(Move.SEND, switch, packet),))
                steps.append((Transfer(Move.COPY, switch, packet),))
        return steps

    sizes = EvenSizes(elements, slots * packets)
    return CollectiveSchedule("all_reduce", "switchml", ranks, sizes, program, slots, switches=1)


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
