"""SwitchML's slot protocol in virtual time: workers and a switch that exchange packets over links that lose some of
them. The state machines are those of `decide.switch_slots`; this gives them a clock, links and losses. `cumulo
simulate network --algorithm switchml` calls it.

    run = play_switch(SwitchLinks(workers=8, bytes_per_s=12.5e9, latency_s=1e-6, loss=1e-3), packets=4000, slots=64)
"""

import heapq
import math
import random
from dataclasses import dataclass
from typing import Literal

from cumulo.collectives.decide.switch_slots import SlotPacket, SlotWorker, SwitchPool

PACKET_BYTES = 1024  # of payload: 256 numbers of 32 bits
_HEADER_BYTES = 64  # Ethernet, IP, UDP and SwitchML's own


@dataclass(frozen=True, slots=True)
class SwitchLinks:
    workers: int
    bytes_per_s: float  # of each worker's link, each way
    latency_s: float  # worker to switch, one way
    loss: float = 0.0  # of packets, each way
    timeout_s: float = 1e-3  # after which a worker sends a packet again
    seed: int = 0

    @property
    def packet_s(self) -> float:
        return (PACKET_BYTES + _HEADER_BYTES) / self.bytes_per_s

    @property
    def slots_for_line_rate(self) -> int:
        """Packets that a worker must have under way, so that its link never waits for an answer."""
        return math.ceil(2 * (self.latency_s + self.packet_s) / self.packet_s)


@dataclass(frozen=True, slots=True)
class SwitchRun:
    seconds: float
    sent: int  # packets of workers, those sent again included
    lost: int  # both ways
    again: int
    right: bool  # every worker has every sum


Event = tuple[float, int, Literal["switch", "worker", "timer"], int, SlotPacket]


def play_switch(links: SwitchLinks, packets: int, slots: int) -> SwitchRun:
    """One all-reduce of so many packets. Each worker's numbers are its own, and the sums are checked."""
    return _Play(links, packets, slots).run()


class _Play:
    def __init__(self, links: SwitchLinks, packets: int, slots: int) -> None:
        self.links, self.packets = links, packets
        self.pool = SwitchPool(links.workers)
        self.workers = [
            SlotWorker(worker, [(_number(worker, at),) for at in range(packets)], slots)
            for worker in range(links.workers)
        ]
        self.random = random.Random(links.seed)
        self.free_up = [0.0] * links.workers  # when the link has sent what was given to it
        self.free_down = [0.0] * links.workers
        self.events: list[Event] = []
        self.made = 0  # events so far: equal times keep their order
        self.sent = self.lost = self.again = 0

    def run(self) -> SwitchRun:
        for starting in self.workers:
            for packet in starting.begin():
                self._send(0.0, packet)
        now, waiting = 0.0, len(self.workers)
        while self.events and waiting:
            now, _, kind, worker, packet = heapq.heappop(self.events)
            if kind == "switch":
                self._at_switch(now, packet)
            elif kind == "timer":
                if self.workers[worker].again(packet.slot) is packet:
                    self.again += 1
                    self._send(now, packet)
            elif not self.workers[worker].done:
                if (following := self.workers[worker].receive(packet)) is not None:
                    self._send(now, following)
                waiting -= self.workers[worker].done
        sums = {
            at: (sum(_number(one, at) for one in range(self.links.workers)),) for at in range(self.packets)
        }
        return SwitchRun(
            now, self.sent, self.lost, self.again, all(one.results == sums for one in self.workers)
        )

    def _send(self, now: float, packet: SlotPacket) -> None:
        worker = packet.worker
        self.sent += 1
        self.free_up[worker] = max(self.free_up[worker], now) + self.links.packet_s
        self._push(self.free_up[worker] + self.links.timeout_s, "timer", worker, packet)
        if self._arrives():
            self._push(self.free_up[worker] + self.links.latency_s, "switch", worker, packet)

    def _at_switch(self, now: float, packet: SlotPacket) -> None:
        answer = self.pool.receive(packet)
        if answer is None:
            return
        for worker in answer[1]:
            self.free_down[worker] = max(self.free_down[worker], now) + self.links.packet_s
            if self._arrives():
                self._push(self.free_down[worker] + self.links.latency_s, "worker", worker, answer[0])

    def _arrives(self) -> bool:
        if self.random.random() >= self.links.loss:
            return True
        self.lost += 1
        return False

    def _push(
        self, at: float, kind: Literal["switch", "worker", "timer"], worker: int, packet: SlotPacket
    ) -> None:
        self.made += 1
        heapq.heappush(self.events, (at, self.made, kind, worker, packet))


def _number(worker: int, packet: int) -> int:
    """What a worker adds: no two sums are alike by accident."""
    return (worker + 1) * 1_000_003 + packet * (worker + 7)
