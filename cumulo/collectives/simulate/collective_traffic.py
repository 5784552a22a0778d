"""A collective of one or many groups as traffic. Commands and the training step call it.

Schedules whose ranks are alike, and rings over rails, are played round by round; all others message by
message, which is for a few thousand ranks."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, Move, Transfer
from cumulo.collectives.simulate.fabrics.links import Ints
from cumulo.collectives.simulate.player import Messages, NetworkTraffic, RoundTraffic
from cumulo.collectives.simulate.rounds import (
    MessageRound,
    on_groups,
    rail_orders,
    ring_rounds,
    rounds_of,
    thinned,
)
from cumulo.errors import ConfigError


@dataclass(slots=True)
class _Lane:
    """One channel of one rank."""

    rank: int
    steps: Sequence[CollectiveStep]
    at: int = -1
    open: int = 0


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
        self._lanes: Mapping[tuple[int, int], _Lane] = {
            (rank, channel): _Lane(rank, schedule.steps(rank, channel))
            for rank in range(schedule.nodes)
            for channel in range(schedule.channels)
        }
        self._sends: dict[tuple[int, int, int], deque[tuple[_Lane, Transfer]]] = defaultdict(deque)
        self._receives: dict[tuple[int, int, int], deque[_Lane]] = defaultdict(deque)
        self._under_way: dict[int, tuple[_Lane, _Lane]] = {}
        self._started: list[tuple[int, int, float, int]] = []
        self._count = 0

    def begin(self) -> Iterator[Messages]:
        for (_, channel), lane in self._lanes.items():
            self._next(lane, channel)
        yield from self._messages()

    def sent(self, tags: Ints) -> Iterator[Messages]:
        for tag in tags.tolist():
            self._end(self._under_way[tag][0], tag)
        yield from self._messages()

    def delivered(self, tags: Ints) -> Iterator[Messages]:
        for tag in tags.tolist():
            self._end(self._under_way.pop(tag)[1], tag)
        yield from self._messages()

    def _end(self, lane: _Lane, tag: int) -> None:
        lane.open -= 1
        if not lane.open:
            self._next(lane, tag % self.schedule.channels)

    def _next(self, lane: _Lane, channel: int) -> None:
        lane.at += 1
        while lane.at < len(lane.steps) and not lane.steps[lane.at]:
            lane.at += 1
        if lane.at >= len(lane.steps):
            return
        step = lane.steps[lane.at]
        lane.open = len(step)
        for transfer in step:
            if transfer.move is Move.SEND:
                key = (lane.rank, transfer.peer, channel)
                self._sends[key].append((lane, transfer))
            else:
                key = (transfer.peer, lane.rank, channel)
                self._receives[key].append(lane)
            if self._sends[key] and self._receives[key]:
                self._start(key, *self._sends[key].popleft(), self._receives[key].popleft())

    def _start(self, key: tuple[int, int, int], sender: _Lane, transfer: Transfer, receiver: _Lane) -> None:
        tag = self._count * self.schedule.channels + key[2]
        self._count += 1
        self._under_way[tag] = (sender, receiver)
        size = self.schedule.elements(transfer) * self.element_bytes
        self._started.append((int(self.placement[key[0]]), int(self.placement[key[1]]), size, tag))

    def _messages(self) -> Iterator[Messages]:
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
