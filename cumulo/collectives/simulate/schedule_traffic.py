"""A collective schedule as traffic, message by message: a message starts when sender and receiver have
both come to it (rendezvous), and a rank's next step when its messages have ended. For schedules whose
ranks differ, jobs with late ranks and fabrics where links differ; `rounds` plays large ones with equal ranks."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, Move, Transfer
from cumulo.collectives.simulate.fabrics.links import Ints
from cumulo.collectives.simulate.player import Messages


@dataclass(slots=True)
class _Lane:
    """One channel of one rank."""

    rank: int
    steps: Sequence[CollectiveStep]
    at: int = -1
    open: int = 0


class ScheduleTraffic:
    """`placement`: the GPU of each rank. Switches that add are placed after them."""

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
