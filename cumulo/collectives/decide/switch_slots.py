"""SwitchML: a switch adds, in a pool of slots (Sapio et al. 2021, algorithms 1 to 4). The schedule, for the checker
and the players, and the protocol that survives lost packets, as two state machines without clock or socket.

A worker has a packet under way in every slot. A slot's answer is also the permission to use the slot again, for the
packet that is a pool further on, so the switch needs no more memory than its pool and no flow control. Each slot
has two copies, used in turn: while one collects packet i, the other still has the sum of packet i − pool, for a
worker whose answer was lost. A worker that hears nothing for a while sends its packet again; the switch notes whom
it has heard and for which packet, so that one that arrives twice, or late, is counted once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cumulo.collectives.decide.schedule import (
    CollectiveSchedule,
    CollectiveStep,
    EvenSizes,
    Move,
    Transfer,
)


def switchml(ranks: int, elements: int, packets: int, slots: int = 1) -> CollectiveSchedule:
    """Packets of the buffer through a pool of slots, each a channel: no packet lost."""
    switch = ranks

    def program(node: int, slot: int) -> Sequence[CollectiveStep]:
        steps: list[CollectiveStep] = []
        for packet in range(slot, slots * packets, slots):
            if node == switch:
                steps.append(tuple(Transfer(Move.REDUCE, rank, packet) for rank in range(ranks)))
                steps.append(tuple(Transfer(Move.SEND, rank, packet) for rank in range(ranks)))
            else:
                steps.append((Transfer(Move.SEND, switch, packet),))
                steps.append((Transfer(Move.COPY, switch, packet),))
        return steps

    sizes = EvenSizes(elements, slots * packets)
    return CollectiveSchedule("all_reduce", "switchml", ranks, sizes, program, slots, switches=1)


@dataclass(frozen=True, slots=True)
class SlotPacket:
    """Between a worker and the switch; the switch's answer has the sum, and goes to one worker or to all."""

    worker: int
    slot: int
    version: int  # which of the slot's two copies
    offset: int  # the packet's number in the buffer
    values: tuple[int, ...]  # SwitchML adds integers: gradients are scaled and rounded by the worker


@dataclass(slots=True)
class _SlotCopy:
    offset: int
    sums: list[int]
    heard: set[int]


@dataclass(slots=True)
class SwitchPool:
    """The switch: what it keeps of a pool, and what it answers."""

    workers: int
    copies: dict[tuple[int, int], _SlotCopy] = field(default_factory=dict)

    def receive(self, packet: SlotPacket) -> tuple[SlotPacket, Sequence[int]] | None:
        """The answer and to whom it goes; None: others' parts are missing, or nobody waits for it any more."""
        copy = self.copies.get((packet.version, packet.slot))
        if copy is None or packet.offset > copy.offset:
            # All workers have the last sum of this copy: each has sent to the other one since.
            copy = _SlotCopy(packet.offset, [0] * len(packet.values), set())
            self.copies[packet.version, packet.slot] = copy
        if packet.offset < copy.offset:
            return None
        if packet.worker in copy.heard:  # sent again
            whole = len(copy.heard) == self.workers
            return (self._answer(packet, copy), (packet.worker,)) if whole else None
        copy.heard.add(packet.worker)
        copy.sums = [a + b for a, b in zip(copy.sums, packet.values, strict=True)]
        if len(copy.heard) < self.workers:
            return None
        return self._answer(packet, copy), range(self.workers)

    @staticmethod
    def _answer(packet: SlotPacket, copy: _SlotCopy) -> SlotPacket:
        return SlotPacket(packet.worker, packet.slot, packet.version, copy.offset, tuple(copy.sums))


@dataclass(slots=True)
class SlotWorker:
    """A worker: its buffer, what it has under way, and the sum as it comes back."""

    worker: int
    packets: Sequence[tuple[int, ...]]
    slots: int
    results: dict[int, tuple[int, ...]] = field(default_factory=dict)
    under_way: dict[int, SlotPacket] = field(default_factory=dict)  # by slot

    def begin(self) -> list[SlotPacket]:
        return [self._send(slot, 0) for slot in range(min(self.slots, len(self.packets)))]

    def receive(self, answer: SlotPacket) -> SlotPacket | None:
        """The next packet of the slot; None: it has no more, or the answer is an old one."""
        waits = self.under_way.get(answer.slot)
        if waits is None or waits.offset != answer.offset:
            return None
        del self.under_way[answer.slot]
        self.results[answer.offset] = answer.values
        following = answer.offset + self.slots
        return self._send(following, 1 - answer.version) if following < len(self.packets) else None

    def again(self, slot: int) -> SlotPacket | None:
        """The timer of a slot has run out."""
        return self.under_way.get(slot)

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.packets)

    def _send(self, offset: int, version: int) -> SlotPacket:
        packet = SlotPacket(self.worker, offset % self.slots, version, offset, self.packets[offset])
        self.under_way[packet.slot] = packet
        return packet
