"""Packets, switch by switch, where they decide: finite buffers, pauses (PFC), victims and deadlock. The lint, the
documentation and tests play small sets of flows with it.

Time goes in slots, in each of which a link carries one packet. A link is paused while the buffer at its end holds
`threshold` packets or more; packets at their last switch leave it one slot later. Packets for one next
switch leave in the order they came. The play ends in a deadlock, in a state that it was in before (so it
goes on for ever), or after `most_slots`.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cumulo.collectives.decide.buffer_cycles import Buffer, BufferKind, PacketFlow

_HOST = "host of "


@dataclass(frozen=True, slots=True)
class PacketRun:
    slots: int
    delivered: dict[str, int]  # packets of each flow
    paused: dict[tuple[str, str], int]  # slots for which each link was paused while it had something to send
    stopped_at: int | None  # the slot of the deadlock
    stopped: tuple[Buffer, ...]  # a circle of buffers that can never drain
    forever: bool  # it ended because a state came again: there is no deadlock, ever

    def share(self, flow: str) -> float:
        """The share of a link that the flow reached."""
        return self.delivered[flow] / self.slots if self.slots else 0.0


class PacketNetwork:
    def __init__(
        self, flows: Sequence[PacketFlow], threshold: int, kind: BufferKind = "shared", lossless: bool = True
    ) -> None:
        self.flows, self.threshold, self.kind, self.lossless = tuple(flows), threshold, kind, lossless
        self.buffers = [flow.buffers(kind) for flow in self.flows]
        self.queues: dict[tuple[Buffer, str], deque[int]] = defaultdict(deque)  # (buffer, next switch)
        self.held: Counter[Buffer] = Counter()
        self.place: list[dict[Buffer, int]] = [
            {buffer: at for at, buffer in enumerate(path)} for path in self.buffers
        ]
        self.credit = [0.0] * len(self.flows)
        self.turn: dict[tuple[str, str], int] = defaultdict(int)  # which buffer a link serves next
        feeding: dict[tuple[str, str], set[Buffer]] = defaultdict(set)
        for path in self.buffers:
            for one, after in pairwise(path):
                feeding[one[0], after[0]].add(one)
        self.feeding = {link: tuple(sorted(buffers)) for link, buffers in sorted(feeding.items())}
        self.delivered: Counter[str] = Counter({flow.name: 0 for flow in self.flows})
        self.paused: Counter[tuple[str, str]] = Counter()

    def run(self, most_slots: int = 20_000, until_repeat: bool = True) -> PacketRun:
        """`until_repeat` False: play all slots, for shares of a long time."""
        seen: set[object] = set()
        for slot in range(1, most_slots + 1):
            self._slot()
            if self.lossless and (stuck := self._stuck()):
                return self._result(slot, slot, stuck, False)
            if not until_repeat:
                continue
            state = self._state()
            if state in seen:
                return self._result(slot, None, (), True)
            seen.add(state)
        return self._result(most_slots, None, (), False)

    def _result(
        self, slots: int, stopped_at: int | None, stuck: tuple[Buffer, ...], forever: bool
    ) -> PacketRun:
        return PacketRun(slots, dict(self.delivered), dict(self.paused), stopped_at, stuck, forever)

    def _full(self, buffer: Buffer) -> bool:
        return self.lossless and self.held[buffer] >= self.threshold

    def _slot(self) -> None:
        full = {buffer for buffer in self.held if self._full(buffer)}
        moves: list[tuple[Buffer, str, int]] = []
        for link, feeding in self.feeding.items():
            first = self.turn[link]
            for step in range(len(feeding)):
                at = (first + step) % len(feeding)
                queue = self.queues.get((feeding[at], link[1]))
                if not queue:
                    continue
                after = self._after(queue[0], feeding[at])
                if after in full:
                    self.paused[link] += 1
                    continue
                moves.append((feeding[at], link[1], queue[0]))
                self.turn[link] = (at + 1) % len(feeding)
                break
        leaving = [
            (buffer, queue.popleft())
            for (buffer, to), queue in self.queues.items()
            if to.startswith(_HOST) and queue
        ]
        for buffer, flow in leaving:  # each flow has a host of its own at its end
            self.held[buffer] -= 1
            self.delivered[self.flows[flow].name] += 1
        for buffer, to, flow in moves:
            self.queues[buffer, to].popleft()
            self.held[buffer] -= 1
            self._put(flow, self._after(flow, buffer))
        for number, rate in enumerate(one.rate for one in self.flows):
            self.credit[number] = min(1.0, self.credit[number] + rate)
            if self.credit[number] >= 1.0 and self.buffers[number][0] not in full:
                self.credit[number] -= 1.0
                self._put(number, self.buffers[number][0])

    def _after(self, flow: int, buffer: Buffer) -> Buffer:
        return self.buffers[flow][self.place[flow][buffer] + 1]

    def _put(self, flow: int, buffer: Buffer) -> None:
        path, at = self.buffers[flow], self.place[flow][buffer]
        to = path[at + 1][0] if at + 1 < len(path) else _HOST + self.flows[flow].name
        self.queues[buffer, to].append(flow)
        self.held[buffer] += 1

    def _stuck(self) -> tuple[Buffer, ...]:
        """Buffers that stay full whatever happens: even if all packets for elsewhere leave, those for each other
        are `threshold` or more. The largest such set, by taking away those that can drain."""
        closed = {buffer for buffer in self.held if self._full(buffer)}
        while closed:
            waiting: Counter[Buffer] = Counter()
            for (buffer, _), queue in self.queues.items():
                if buffer in closed:
                    # Behind a packet for a closed buffer nothing leaves; before it everything does.
                    blocked = False
                    for flow in queue:
                        place = self.place[flow][buffer] + 1
                        ends = place >= len(self.buffers[flow])
                        blocked = blocked or (not ends and self.buffers[flow][place] in closed)
                        waiting[buffer] += blocked
            draining = {buffer for buffer in closed if waiting[buffer] < self.threshold}
            if not draining:
                return self._circle(closed)
            closed -= draining
        return ()

    def _circle(self, closed: set[Buffer]) -> tuple[Buffer, ...]:
        at = min(closed)
        way: list[Buffer] = []
        while at not in way:
            way.append(at)
            at = min(
                after
                for (buffer, _), queue in self.queues.items()
                if buffer == at
                for flow in queue
                if (place := self.place[flow][buffer] + 1) < len(self.buffers[flow])
                and (after := self.buffers[flow][place]) in closed
            )
        return tuple(way[way.index(at) :])

    def _state(self) -> object:
        queues = tuple((key, tuple(queue)) for key, queue in sorted(self.queues.items()) if queue)
        credit = tuple(round(one, 9) for one in self.credit)
        return queues, credit, tuple(sorted(self.turn.items()))
