"""What a rank says when a collective does not go on: the collective, the rank, the step, and for whom it waits."""

from dataclasses import dataclass

from cumulo.collectives.decide.schedule import CollectiveSchedule, Move, Transfer
from cumulo.errors import RanksFailed


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

    def differs(
        self, transfer: Transfer, got: tuple[int, int, int], want: tuple[int, int]
    ) -> CollectiveFailed:
        """Got: the collective's number, the sender's step, bytes. Want: number and bytes."""
        number, step, size = got
        if number != want[0]:
            why = f"that rank is in its collective number {number}, this one in number {want[0]}"
        else:
            why = f"its message of step {step + 1} has {size} bytes, and {want[1]} were expected"
        return self.failed(transfer, why)
