"""What a rank says when a collective does not go on: the collective, the rank, the step, and for whom it waits."""

from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from cumulo.collectives.decide.schedule import CollectiveSchedule, Move, Transfer
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
