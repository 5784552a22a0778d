"""Plays schedules by messages: sockets and torch.distributed. `MessageExchange` moves what one step sends and
receives; all else is here, once for both.

    player = MessagePlayer(rank, SocketExchange(rank, store, timeout_s=60))
    player.run(schedule, tensor)
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from torch import Tensor

from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, Move, Transfer
from cumulo.collectives.play.homes import Homes
from cumulo.collectives.play.waiting import CollectiveStanding

Parts = Sequence[tuple[Transfer, list[Tensor]]]


class MessageExchange(Protocol):
    def exchange(self, number: int, standing: CollectiveStanding, sends: Parts, receives: Parts) -> None:
        """All of them at the same time; those between two ranks in order."""

    def prepare(self, schedule: CollectiveSchedule) -> None: ...


def peers_of(schedule: CollectiveSchedule, rank: int) -> set[tuple[int, int]]:
    """(peer, channel) of all its messages."""
    return {
        (transfer.peer, channel)
        for channel in range(schedule.channels)
        for step in schedule.steps(rank, channel)
        for transfer in step
    }


class MessagePlayer:
    def __init__(self, rank: int, exchange: MessageExchange) -> None:
        self.rank, self._exchange = rank, exchange
        self._number = 0  # collectives so far

    def run(self, schedule: CollectiveSchedule, tensor: Tensor, received: Tensor | None = None) -> None:
        """In place; see `homes`. All ranks call it with the same schedule."""
        homes = Homes(schedule, self.rank, tensor, received)
        self._number += 1
        self._exchange.prepare(schedule)
        if schedule.channels == 1:
            self._lane(schedule, homes, 0)
            return
        with ThreadPoolExecutor(schedule.channels) as threads:
            for done in [
                threads.submit(self._lane, schedule, homes, channel) for channel in range(schedule.channels)
            ]:
                done.result()

    def _lane(self, schedule: CollectiveSchedule, homes: Homes, channel: int) -> None:
        for index, step in enumerate(schedule.steps(self.rank, channel)):
            self._step(CollectiveStanding(schedule, self.rank, channel, index), homes, step)

    def _step(self, standing: CollectiveStanding, homes: Homes, step: CollectiveStep) -> None:
        sends = [(transfer, homes.views(transfer)) for transfer in step if transfer.move is Move.SEND]
        leaving = {chunk for transfer, _ in sends for chunk in transfer.chunks}
        receives, staged = [], []
        for transfer in step:
            if transfer.move is Move.SEND:
                continue
            views = homes.views(transfer)
            if transfer.move is Move.REDUCE or not leaving.isdisjoint(transfer.chunks):
                views = [view.new_empty(view.shape) for view in views]
                staged.append((transfer, views))
            receives.append((transfer, views))
        self._exchange.exchange(self._number, standing, sends, receives)
        homes.take_in(staged)
