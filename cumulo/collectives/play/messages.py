"""Plays schedules by messages: sockets and torch.distributed. `MessageExchange` moves what one step sends and
receives; all else is here, once for both.

    player = MessagePlayer(rank, SocketExchange(rank, store, timeout_s=60))
    player.run(schedule, tensor)
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, Move, Transfer
from cumulo.collectives.play.tensor_chunks import TensorChunks
from cumulo.errors import RanksFailed


class MessageHead(NamedTuple):
    """What every message says of itself."""

    number: int  # of the collective, counted by each rank
    fingerprint: int  # of its schedule
    size: int  # bytes


class CollectiveFailed(RanksFailed):
    """A peer is lost, late, or sent something else."""


@dataclass(frozen=True, slots=True)
class CollectiveStanding:
    """Where a rank stands in a collective."""

    schedule: CollectiveSchedule
    rank: int
    channel: int
    step: int

    def late(self, transfer: Transfer, timeout_s: float) -> CollectiveFailed:
        return self.failed(transfer, f"nothing came for {timeout_s:g} s")

    def gone(self, transfer: Transfer) -> CollectiveFailed:
        return self.failed(transfer, f"rank {transfer.peer} is gone")

    def failed(self, transfer: Transfer, why: str) -> CollectiveFailed:
        steps = len(self.schedule.steps(self.rank, self.channel))
        way = "send to" if transfer.move is Move.SEND else "receive from"
        return CollectiveFailed(
            f"{self.schedule.name}: rank {self.rank} could not {way} rank {transfer.peer} in step {self.step + 1} "
            f"of {steps} (channel {self.channel}, chunk {transfer.chunk}): {why}"
        )

    def cut(self, transfer: Transfer, got: int, want: int, in_header: bool) -> CollectiveFailed:
        """The connection ended."""
        if in_header and not got:
            return self.gone(transfer)
        return self.failed(transfer, f"the message was cut after {got} of {want} bytes, and the rank is gone")

    def differs(self, transfer: Transfer, got: MessageHead, want: MessageHead) -> CollectiveFailed:
        if got.number != want.number:
            why = f"that rank is in its collective number {got.number}, this one in number {want.number}"
        elif got.fingerprint != want.fingerprint:
            why = "that rank plays another schedule: give all ranks the same algorithm, channels and sizes"
        else:
            why = f"its message has {got.size} bytes, and {want.size} were expected"
        return self.failed(transfer, why)


def wait_in_store(store: Store, key: str, peer: int, rank: int, timeout_s: float) -> str:
    """What a peer says of itself, before the first step."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return store.get(key).decode()
    except DistStoreError:
        raise CollectiveFailed(
            f"rank {peer} did not meet rank {rank} within {timeout_s:g} s, before step 1 of their first "
            "collective: it is lost, late, or uses another transport"
        ) from None


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
        """Plays a schedule in place; see `tensor_chunks`. All ranks call it with the same schedule."""
        chunks = TensorChunks(schedule, self.rank, tensor, received)
        self._number += 1
        self._exchange.prepare(schedule)
        if schedule.channels == 1:
            self._lane(schedule, chunks, 0)
            return
        with ThreadPoolExecutor(schedule.channels) as threads:
            for done in [
                threads.submit(self._lane, schedule, chunks, channel) for channel in range(schedule.channels)
            ]:
                done.result()

    def _lane(self, schedule: CollectiveSchedule, chunks: TensorChunks, channel: int) -> None:
        for index, step in enumerate(schedule.steps(self.rank, channel)):
            self._step(CollectiveStanding(schedule, self.rank, channel, index), chunks, step)

    def _step(self, standing: CollectiveStanding, chunks: TensorChunks, step: CollectiveStep) -> None:
        sends = [(transfer, chunks.views(transfer)) for transfer in step if transfer.move is Move.SEND]
        leaving = {chunk for transfer, _ in sends for chunk in transfer.chunks}
        receives, staged = [], []
        for transfer in step:
            if transfer.move is Move.SEND:
                continue
            views = chunks.views(transfer)
            if transfer.move is Move.REDUCE or not leaving.isdisjoint(transfer.chunks):
                views = [view.new_empty(view.shape) for view in views]
                staged.append((transfer, views))
            receives.append((transfer, views))
        self._exchange.exchange(self._number, standing, sends, receives)
        chunks.take_in(staged)
