"""Rounds: messages that start together, as arrays, and how often they are repeated. What makes 100,000 ranks quick:
a ring of n ranks is one round, 2(n − 1) times.

    for one in rounds_of(schedule, element_bytes=2): ...     # of a schedule whose ranks are alike
    ring_rounds(rings_over_rails(groups, 8), gib / 8)        # of rings with orders of their own
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from cumulo.collectives.decide.levels import rail_orders
from cumulo.collectives.decide.schedule import CollectiveSchedule, Move
from cumulo.collectives.simulate.fabrics.links import Floats, Ints
from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MessageRound:
    source: Ints
    target: Ints
    size_bytes: Floats
    repeat: int = 1


def rounds_of(schedule: CollectiveSchedule, element_bytes: float) -> Iterator[MessageRound]:
    """Step by step, all ranks and channels at once; equal steps that follow each other are one round, repeated."""
    if not schedule.symmetry:
        raise ConfigError(
            f"{schedule.name} has ranks that differ; play it message by message (ScheduleTraffic), or take a "
            "schedule whose ranks are alike"
        )
    ranks = np.arange(schedule.ranks)
    lanes = [_sends(schedule, channel) for channel in range(schedule.channels)]
    steps = max(len(lane) for lane in lanes)
    merged = (tuple(lane[step] if step < len(lane) else () for lane in lanes) for step in range(steps))
    for sends, alike in groupby(merged):
        flat = [send for lane in sends for send in lane]
        if not flat:
            continue
        targets = [schedule.moved(peer, ranks) for peer, _ in flat]
        sizes = [np.full(len(ranks), elements * element_bytes) for _, elements in flat]
        yield MessageRound(
            np.tile(ranks, len(flat)), np.concatenate(targets), np.concatenate(sizes), sum(1 for _ in alike)
        )


def _sends(schedule: CollectiveSchedule, channel: int) -> list[tuple[tuple[int, int], ...]]:
    return [
        tuple((one.peer, schedule.elements(one)) for one in step if one.move is Move.SEND)
        for step in schedule.steps(0, channel)
    ]


def ring_rounds(orders: Ints, size_bytes: float, times: int = 2) -> MessageRound:
    """Rings side by side, one for each row of `orders`, each of `size_bytes`. `times`: 2 for an all-reduce, 1 for a
    gather or a scatter."""
    ranks = orders.shape[1]
    source, target = orders.ravel(), np.roll(orders, -1, axis=1).ravel()
    chunk = size_bytes / ranks
    return MessageRound(source, target, np.full(len(source), chunk), times * (ranks - 1))


def rings_over_rails(groups: Ints, per_node: int) -> Ints:
    """The rings of `multi_ring_all_reduce`, one row for each group (a row of GPUs, node after node) and channel."""
    ranks = groups.shape[1]
    return groups[:, np.array(rail_orders(ranks, per_node))].reshape(-1, ranks)


def on_groups(one: MessageRound, groups: Ints) -> MessageRound:
    """A round of ranks 0, 1, ... on every row of `groups` at once."""
    count = len(groups)
    return MessageRound(
        groups[:, one.source].ravel(),
        groups[:, one.target].ravel(),
        np.tile(one.size_bytes, count),
        one.repeat,
    )


def thinned(rounds: list[MessageRound], most: int) -> list[MessageRound]:
    """Of many rounds that follow each other, `most` that stand for their neighbours: for the n − 1 exchanges of an
    all-to-all, of which one is as good as the next."""
    if len(rounds) <= most:
        return rounds
    edges = np.linspace(0, len(rounds), most + 1).astype(int)
    return [
        replace(rounds[(low + high) // 2], repeat=sum(one.repeat for one in rounds[low:high]))
        for low, high in pairwise(edges.tolist())
    ]
