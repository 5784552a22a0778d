"""A collective of one or many groups as traffic. Commands and the training step call it.

Schedules whose ranks are alike, and rings over rails, are played round by round; all others message by
message, which is for a few thousand ranks."""

import numpy as np

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.simulate.fabrics.links import Ints
from cumulo.collectives.simulate.player import NetworkTraffic, RoundTraffic
from cumulo.collectives.simulate.rounds import (
    MessageRound,
    on_groups,
    rail_orders,
    ring_rounds,
    rounds_of,
    thinned,
)
from cumulo.collectives.simulate.schedule_traffic import ScheduleTraffic
from cumulo.errors import ConfigError

_MOST_ROUNDS = 16  # of an all-to-all's n − 1, that are played
_MOST_EXPLICIT = 1024  # ranks whose messages are played one by one
_TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def collective_traffic(
    name: str,
    collective: str,
    algorithm: str,
    groups: Ints,
    size_bytes: float,
    per_node: int,
    start_s: float = 0.0,
    background: bool = False,
    pieces: int = 1,
) -> NetworkTraffic:
    """`groups`: the GPUs of each group, in the order of their ranks; `per_node`: members that share a node.
    `size_bytes` as nccl-tests counts it."""
    groups = np.atleast_2d(groups)
    rounds = _rounds(collective, algorithm, groups, size_bytes, per_node)
    if rounds is not None:
        return RoundTraffic(name, rounds, start_s, background)
    if groups.size > _MOST_EXPLICIT or len(groups) > 1:
        raise ConfigError(
            f"{algorithm} {collective} has ranks that differ, and is played message by message: take at most "
            f"{_MOST_EXPLICIT:,} ranks in one group, or another algorithm: multi-ring, two-level, ring"
        )
    shape = CollectiveShape(groups.shape[1], max(1, int(size_bytes)), per_node, pieces=pieces)
    return ScheduleTraffic(
        name, make_schedule(collective, algorithm, shape), 1.0, groups[0], start_s, background
    )


def _rounds(
    collective: str, algorithm: str, groups: Ints, size_bytes: float, per_node: int
) -> list[MessageRound] | None:
    ranks = groups.shape[1]
    if ranks == 1:
        return []
    if collective == "send":  # each rank to the next, the last to nobody
        source, target = groups[:, :-1].ravel(), groups[:, 1:].ravel()
        return [MessageRound(source, target, np.full(len(source), size_bytes))]
    if collective == "incast":  # all to the first
        source = groups[:, 1:].ravel()
        target = np.repeat(groups[:, 0], ranks - 1)
        return [MessageRound(source, target, np.full(len(source), size_bytes))]
    if algorithm == "multi-ring" and collective in _TIMES and ranks % per_node == 0:
        return [ring_rounds(rail_orders(groups, per_node), size_bytes / per_node, _TIMES[collective])]
    if algorithm == "multi-ring":
        algorithm = "ring"
    schedule = make_schedule(
        collective,
        algorithm,
        CollectiveShape(ranks, max(1, int(size_bytes)), per_node if ranks % per_node == 0 else 1),
    )
    if not schedule.symmetry:
        return None
    return [on_groups(one, groups) for one in thinned(list(rounds_of(schedule, 1.0)), _MOST_ROUNDS)]
