"""ScheduleWalk: a schedule gone through message by message. A send meets its receive when both ranks have come to
it (rendezvous). The checker, the cost model, the reference player and the network simulator walk so.

    walk = ScheduleWalk(schedule, meet)     # meet(sender, send, receiver, receive), which ends both, now or later
    walk.start()
    walk.go_on()
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, Move, Transfer


@dataclass(slots=True, eq=False)
class Lane:
    """One channel of one rank: where it stands. Times are in units of whoever counts them."""

    rank: int
    channel: int
    steps: Sequence[CollectiveStep]
    at: int = 0
    open: int = 0  # transfers of its step that have not ended
    begun: int = 0  # when its step began
    ends: int = 0  # when the last message ended that it waits for

    @property
    def over(self) -> bool:
        return self.at >= len(self.steps)


Meet = Callable[[Lane, Transfer, Lane, Transfer], None]  # sender and its send, receiver and its receive
Messages = defaultdict[tuple[int, int, int], deque[tuple[Lane, Transfer]]]  # by sender, receiver and channel


class ScheduleWalk:
    def __init__(
        self,
        schedule: CollectiveSchedule,
        meet: Meet,
        begins: Callable[[Lane], None] = lambda lane: None,
        channels: Iterable[int] | None = None,
    ) -> None:
        """`begins` is called before the messages of a lane's step are started. `channels`: only these."""
        self._meet, self._begins = meet, begins
        self.lanes = [
            Lane(rank, channel, schedule.steps(rank, channel))
            for rank in range(schedule.nodes)
            for channel in (range(schedule.channels) if channels is None else channels)
        ]
        self.sends: Messages = defaultdict(deque)  # that wait for their receive
        self.receives: Messages = defaultdict(deque)
        self._ready: deque[Lane] = deque()  # whose step has ended

    def start(self) -> None:
        for lane in self.lanes:
            self._begin(lane)

    def end(self, lane: Lane) -> None:
        """One transfer of the lane's step has ended."""
        lane.open -= 1
        if not lane.open:
            self._ready.append(lane)

    def go_on(self, finish: Callable[[Lane], None] = lambda lane: None) -> None:
        """Lanes whose step has ended begin the next one, until all wait. `finish` is called in between."""
        while self._ready:
            lane = self._ready.popleft()
            finish(lane)
            lane.at += 1
            self._begin(lane)

    def _begin(self, lane: Lane) -> None:
        while not lane.over and not lane.steps[lane.at]:
            lane.at += 1
        if lane.over:
            return
        step = lane.steps[lane.at]
        lane.open, lane.begun = len(step), lane.ends
        self._begins(lane)
        for transfer in step:
            sends = transfer.move is Move.SEND
            sender, receiver = (lane.rank, transfer.peer) if sends else (transfer.peer, lane.rank)
            key = (sender, receiver, lane.channel)
            (self.sends if sends else self.receives)[key].append((lane, transfer))
            if self.sends[key] and self.receives[key]:
                self._meet(*self.sends[key].popleft(), *self.receives[key].popleft())
