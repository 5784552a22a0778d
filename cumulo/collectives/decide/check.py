"""Proves a schedule: every rank ends with the right value, every contribution counted once, and no deadlock even if
a send waits for its receive (rendezvous). Tests, the command and the players call it before a schedule is trusted.

One play is a proof: whether it comes to its end does not depend on durations, since each rank's order is fixed and
every message has one sender and one receiver. What is counted on the way: steps, messages, elements over each link,
additions.
"""

from collections import defaultdict
from dataclasses import dataclass

from cumulo.collectives.decide.schedule import CollectiveSchedule, Move, Transfer
from cumulo.collectives.decide.walk import Lane, ScheduleWalk
from cumulo.errors import CumuloError

_BITS = 32  # to count one rank's contribution in


class WrongCollective(CumuloError):
    """A schedule that does not do what its collective promises."""


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """What a right schedule does; elements, not bytes."""

    steps: int  # one after another, from the first to the last of any rank
    messages: int
    elements_by_link: dict[tuple[int, int], int]  # (sender, receiver)
    additions_by_rank: tuple[int, ...]  # elements that are added to others

    @property
    def elements(self) -> int:
        return sum(self.elements_by_link.values())

    @property
    def most_sent(self) -> int:
        """Elements that the busiest rank sends."""
        sent: dict[int, int] = defaultdict(int)
        for (sender, _), elements in self.elements_by_link.items():
            sent[sender] += elements
        return max(sent.values(), default=0)


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """A message with its place in time, in steps from 0 on."""

    step: int
    sender: int
    receiver: int
    channel: int
    transfer: Transfer  # as the receiver has it


def placed_messages(schedule: CollectiveSchedule) -> list[PlacedMessage]:
    """All messages of a right schedule, in the order of time: for pictures and tables of small ones."""
    play = _Play(schedule)
    play.run()
    return sorted(play.placed, key=lambda one: (one.step, one.channel, one.sender, one.receiver))


def check_collective(schedule: CollectiveSchedule) -> CollectiveReport:
    """Refuse a wrong schedule by naming a rank, a step and a chunk; count what a right one does."""
    return _Play(schedule).run()


class _Play:
    def __init__(self, schedule: CollectiveSchedule) -> None:
        self.schedule = schedule
        self.held: list[dict[int, int]] = [{} for _ in range(schedule.nodes)]
        for chunk in range(len(schedule.sizes)):
            for rank in schedule.contributors(chunk):
                self.held[rank][chunk] = 1 << (_BITS * rank)
        self.walk = ScheduleWalk(schedule, self._meet, self._check_step)
        self.arrived: dict[Lane, list[tuple[Transfer, dict[int, int]]]] = defaultdict(list)
        self.touched: dict[tuple[int, int], int] = {}
        self.links: dict[tuple[int, int], int] = defaultdict(int)
        self.additions = [0] * schedule.nodes
        self.placed: list[PlacedMessage] = []

    def run(self) -> CollectiveReport:
        self.walk.start()
        self.walk.go_on(self._finish)
        self._check_all_done()
        self._check_values()
        steps = max((lane.ends for lane in self.walk.lanes), default=0)
        return CollectiveReport(steps, len(self.placed), dict(self.links), tuple(self.additions))

    def _meet(self, sender: Lane, sent: Transfer, receiver: Lane, received: Transfer) -> None:
        if sent.chunks != received.chunks:
            raise WrongCollective(
                f"{self.schedule.name}: rank {sender.rank} sends {_what(sent)} in its step {sender.at}, but rank "
                f"{receiver.rank} expects {_what(received)} from it in its step {receiver.at}"
            )
        held = self.held[sender.rank]
        self.arrived[receiver].append((received, {chunk: held[chunk] for chunk in sent.chunks}))
        self.links[sender.rank, receiver.rank] += self.schedule.elements(sent)
        ends = max(sender.begun, receiver.begun) + 1
        self.placed.append(PlacedMessage(ends - 1, sender.rank, receiver.rank, sender.channel, received))
        for lane in (sender, receiver):
            lane.ends = max(lane.ends, ends)
            self.walk.end(lane)

    def _finish(self, lane: Lane) -> None:
        """All messages of its step are through: take in what arrived."""
        held, sizes = self.held[lane.rank], self.schedule.sizes
        copied: set[int] = set()
        as_set = self.schedule.collective == "barrier"
        for transfer, values in self.arrived.pop(lane, []):
            for chunk, value in values.items():
                if transfer.move is Move.COPY:
                    if chunk in copied:
                        raise self._wrong(lane, f"receives chunk {chunk} twice")
                    copied.add(chunk)
                    held[chunk] = value
                elif as_set:
                    held[chunk] = held.get(chunk, 0) | value
                else:
                    if chunk in held:
                        self.additions[lane.rank] += sizes[chunk]
                    held[chunk] = held.get(chunk, 0) + value

    def _check_step(self, lane: Lane) -> None:
        for transfer in lane.steps[lane.at]:
            self._check_belongs(lane, transfer)

    def _check_belongs(self, lane: Lane, transfer: Transfer) -> None:
        nodes = self.schedule.nodes
        if not 0 <= transfer.peer < nodes or transfer.peer == lane.rank:
            raise self._wrong(lane, f"has a message with {transfer.peer}, which is no other rank")
        if transfer.count < 1 or transfer.chunk < 0 or transfer.chunks.stop > len(self.schedule.sizes):
            raise self._wrong(lane, f"has a message of {_what(transfer)}, of {len(self.schedule.sizes)}")
        for chunk in transfer.chunks:
            if self.touched.setdefault((lane.rank, chunk), lane.channel) != lane.channel:
                raise self._wrong(lane, f"touches chunk {chunk}, which another channel uses")
            if transfer.move is Move.SEND and chunk not in self.held[lane.rank]:
                raise self._wrong(lane, f"sends chunk {chunk} to rank {transfer.peer} and does not have it")

    def _check_all_done(self) -> None:
        stuck = [lane for lane in self.walk.lanes if not lane.over]
        if stuck:
            raise WrongCollective(f"{self.schedule.name}: deadlock: {'; '.join(self._circle(stuck))}")

    def _circle(self, stuck: list[Lane]) -> list[str]:
        """Who waits for whom, until one is met again."""
        waits: dict[tuple[int, int], tuple[Lane, Transfer]] = {}
        queues = (*self.walk.sends.values(), *self.walk.receives.values())
        for lane, transfer in (entry for queue in queues for entry in queue):
            waits.setdefault((lane.rank, lane.channel), (lane, transfer))
        said: list[str] = []
        at: tuple[int, int] | None = (stuck[0].rank, stuck[0].channel)
        seen: set[tuple[int, int]] = set()
        while at in waits and at not in seen:
            seen.add(at)
            lane, transfer = waits[at]
            said.append(f"rank {lane.rank} waits in step {lane.at} to {transfer}")
            at = (transfer.peer, lane.channel)
        if at not in waits and at is not None:
            said.append(f"rank {at[0]} has ended")
        return said

    def _check_values(self) -> None:
        schedule = self.schedule
        everyone = sum(1 << (_BITS * rank) for rank in range(schedule.ranks))
        for chunk in range(len(schedule.sizes)):
            parts, destination = schedule.contributors(chunk), schedule.destination(chunk)
            right = everyone if len(parts) == schedule.ranks else sum(1 << (_BITS * rank) for rank in parts)
            for rank in range(schedule.ranks) if destination is None else (destination,):
                value = self.held[rank].get(chunk, 0)
                if value != right:
                    raise WrongCollective(
                        f"{schedule.name}: rank {rank} ends with chunk {chunk} wrong: {self._why(value, right)}"
                    )

    def _why(self, value: int, right: int) -> str:
        mask = (1 << _BITS) - 1
        for rank in range(self.schedule.ranks):
            got, want = value >> (_BITS * rank) & mask, right >> (_BITS * rank) & mask
            if got != want:
                return f"it has rank {rank}'s part {got} times, not {want}"
        return "its parts overflowed"

    def _wrong(self, lane: Lane, what: str) -> WrongCollective:
        node = "rank" if lane.rank < self.schedule.ranks else "switch"
        where = f"{node} {lane.rank}, channel {lane.channel}, step {lane.at}"
        return WrongCollective(f"{self.schedule.name}: {where} {what}")


def _what(transfer: Transfer) -> str:
    last = transfer.chunks.stop - 1
    return f"chunk {transfer.chunk}" if transfer.count == 1 else f"chunks {transfer.chunk} to {last}"
