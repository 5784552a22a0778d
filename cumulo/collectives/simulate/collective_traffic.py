"""A collective of one or many groups as traffic. Commands and the training step call it.

Schedules whose ranks are alike, and rings over rails, are played round by round; all others message by
message, which is for a few thousand ranks."""

from collections.abc import Iterator

import numpy as np

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.schedule import CollectiveSchedule, Transfer
from cumulo.collectives.decide.walk import Lane, ScheduleWalk
from cumulo.collectives.simulate.fabrics.links import Ints
from cumulo.collectives.simulate.player import Messages, NetworkTraffic, RoundTraffic
from cumulo.collectives.simulate.rounds import (
    MessageRound,
    on_groups,
    ring_rounds,
    rings_over_rails,
    rounds_of,
    thinned,
)
from cumulo.errors import ConfigError


class ScheduleTraffic:
    """A collective schedule as traffic, message by message: a message starts when sender and receiver have both
    come to it (rendezvous), and a rank's next step when its messages have ended. For schedules whose ranks
    differ, jobs with late ranks and fabrics where links differ; `rounds` plays large ones with equal ranks.

    `placement`: the GPU of each rank."""

    def __init__(
        self,
        name: str,
        schedule: CollectiveSchedule,
        element_bytes: float,
        placement: Ints | None = None,
        start_s: float = 0.0,
        background: bool = False,
    ) -> None:
        self.name, self.start_s, self.background = name, start_s, background
        self.schedule, self.element_bytes = schedule, element_bytes
        self.placement = np.arange(schedule.nodes) if placement is None else placement
        self._walk = ScheduleWalk(schedule, self._meet)
        self._under_way: dict[int, tuple[Lane, Lane]] = {}
        self._started: list[tuple[int, int, float, int]] = []
        self._count = 0

    def begin(self) -> Iterator[Messages]:
        self._walk.start()
        yield from self._messages()

    def sent(self, tags: Ints) -> Iterator[Messages]:
        for tag in tags.tolist():
            self._walk.end(self._under_way[tag][0])
        yield from self._messages()

    def delivered(self, tags: Ints) -> Iterator[Messages]:
        for tag in tags.tolist():
            self._walk.end(self._under_way.pop(tag)[1])
        yield from self._messages()

    def _meet(self, sender: Lane, sent: Transfer, receiver: Lane, taken: Transfer) -> None:
        self._under_way[self._count] = (sender, receiver)
        source, target = int(self.placement[sender.rank]), int(self.placement[receiver.rank])
        size = self.schedule.elements(sent) * self.element_bytes
        self._started.append((source, target, size, self._count))
        self._count += 1

    def _messages(self) -> Iterator[Messages]:
        self._walk.go_on()
        if not self._started:
            return
        source, target, size, tags = zip(*self._started, strict=True)
        self._started = []
        yield Messages(np.array(source), np.array(target), np.array(size, float), np.array(tags))


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
    shape = CollectiveShape(groups.shape[1], max(1, int(size_bytes)), per_node)
    schedule = make_schedule(collective, algorithm, shape)
    if schedule.switches:
        raise ConfigError(
            f"{algorithm} adds in switches, and those of a simulated fabric do not add: take another algorithm"
        )
    return ScheduleTraffic(name, schedule, 1.0, groups[0], start_s, background)


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
        return [ring_rounds(rings_over_rails(groups, per_node), size_bytes / per_node, _TIMES[collective])]
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
