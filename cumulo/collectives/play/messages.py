"""Plays schedules by messages. A `MessageExchange` (shared memory or torch.distributed) moves what one step sends
and receives; all else is here, once for both.

    player = MessagePlayer(rank, SharedMemoryExchange(rank, ranks, store, timeout_s=60))
    player.run(schedule, tensor)
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, Move, Transfer
from cumulo.collectives.play.tensor_chunks import TensorChunks
from cumulo.errors import RanksFailed


class MessageHead(NamedTuple):
    """What a message says of itself."""

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

    def differs(self, transfer: Transfer, got: MessageHead, want: MessageHead) -> CollectiveFailed:
        if got.number != want.number:
            why = f"that rank is in its collective number {got.number}, this one in number {want.number}"
        elif got.fingerprint != want.fingerprint:
            why = "that rank plays another schedule: give all ranks the same algorithm, channels and sizes"
        else:
            why = f"its message has {got.size} bytes, and {want.size} were expected"
        return self.failed(transfer, why)


Parts = Sequence[tuple[Transfer, list[Tensor]]]


class MessageExchange(Protocol):
    def exchange(self, number: int, standing: CollectiveStanding, sends: Parts, receives: Parts) -> Parts:
        """Sends tensors, and returns what arrived; `receives` has tensors of the same shapes. Messages travel at
        the same time, those between two ranks in order."""
        ...

    def used(self, standing: CollectiveStanding, receives: Parts) -> None:
        """What arrived is not needed any more."""
        ...

    def close(self) -> None: ...


class MessagePlayer:
    def __init__(self, rank: int, exchange: MessageExchange) -> None:
        self.rank, self._exchange = rank, exchange
        self._number = 0  # collectives so far

    def run(self, schedule: CollectiveSchedule, tensor: Tensor, received: Tensor | None = None) -> None:
        """Plays a schedule in place; see `tensor_chunks`. All ranks call it with the same schedule."""
        chunks = TensorChunks(schedule, self.rank, tensor, received)
        self._number += 1
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
        parts = [(transfer, chunks.views(transfer)) for transfer in step]
        sends = [part for part in parts if part[0].move is Move.SEND]
        receives = [part for part in parts if part[0].move is not Move.SEND]
        chunks.take_in(self._exchange.exchange(self._number, standing, sends, receives))
        self._exchange.used(standing, receives)

    def close(self) -> None:
        self._exchange.close()
