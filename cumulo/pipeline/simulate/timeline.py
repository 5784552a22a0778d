"""Plays a schedule in virtual time: `simulate` gives every action's start and end to checker, pictures and planner.

Each stage runs its actions in order; a receive waits for its message, which passes its link behind earlier ones.
A schedule that cannot be played to its end is refused by naming the stages and actions that wait for one another.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, blocks
from cumulo.pipeline.decide.communication import Sends, receive_of, send_of, with_communication
from cumulo.pipeline.decide.costs import Costs
from cumulo.pipeline.decide.stall import ScheduleError, Stall, Waiting, explain

Key = tuple[Kind, int, int, int]  # kind, micro-batch, chunk, direction: an action without its circumstances


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it ran; the overlapped ones of a block share their times."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What the simulation found. Times begin at 0."""

    schedule: PipelineSchedule  # with its communication
    spans: tuple[tuple[Span, ...], ...]  # spans[stage], in order

    @cached_property
    def compute_spans(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(tuple(span for span in stage if span.action.kind.is_compute) for stage in self.spans)

    @cached_property
    def makespan_s(self) -> float:
        return max((spans[-1].end_s for spans in self.compute_spans if spans), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds each stage computes; what overlaps is counted once."""
        return tuple(
            sum(span.end_s - span.start_s for span in spans if not span.action.overlaps_next)
            for spans in self.compute_spans
        )

    @cached_property
    def bubble_s(self) -> tuple[float, ...]:
        """Seconds each stage idles between the step's begin and its end on the last stage."""
        return tuple(self.makespan_s - busy_s for busy_s in self.busy_s)

    @property
    def stage_bubble_ratios(self) -> tuple[float, ...]:
        """Of each stage: the share of the step it idles."""
        return tuple(idle_s / self.makespan_s if self.makespan_s else 0.0 for idle_s in self.bubble_s)

    @property
    def bubble_ratio(self) -> float:
        """Of all stages together: idle time over stages × makespan."""
        whole_s = self.makespan_s * self.schedule.stages
        return sum(self.bubble_s) / whole_s if whole_s else 0.0

    @property
    def inner_bubble_s(self) -> tuple[float, ...]:
        """Seconds each stage idles between its own first and last action.

        The zero-bubble papers count this, because their optimizer step waits for no other stage.
        """
        return tuple(
            spans[-1].end_s - spans[0].start_s - busy_s if spans else 0.0
            for spans, busy_s in zip(self.compute_spans, self.busy_s, strict=True)
        )


def simulate(
    schedule: PipelineSchedule, costs: Costs | None = None, sends: Sends = Sends.BUFFERED
) -> Timeline:
    """Play the schedule, with communication added where it has none; the default costs are 1 for each kind."""
    costs = costs or Costs()
    costs.check_fits(schedule)
    return _Play(with_communication(schedule, sends), costs, sends).run()


class _Play:
    """The state of one simulation."""

    def __init__(self, schedule: PipelineSchedule, costs: Costs, sends: Sends) -> None:
        self.schedule, self.costs, self.sends = schedule, costs, sends
        self.blocks = [list(blocks(order)) for order in schedule.orders]
        self.next = [0] * schedule.stages  # block each stage has reached
        self.clock_s = [0.0] * schedule.stages
        self.spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
        self.done: list[set[Key]] = [set() for _ in range(schedule.stages)]
        # (from, to) -> receives whose messages are on their way, and when they arrive
        self.channels: dict[tuple[int, int], deque[tuple[Action, float]]] = {}
        self.link_free_s: dict[tuple[int, int], float] = {}

    def run(self) -> Timeline:
        # A stage goes as far as it can; what it sends may let another go on. The order in which stages are taken
        # changes nothing: every channel has one sender and one receiver, each with a fixed order.
        ready = deque(range(self.schedule.stages))
        while ready:
            stage = ready.popleft()
            while self.next[stage] < len(self.blocks[stage]):
                block = self.blocks[stage][self.next[stage]]
                if self._waits_for(stage, block) is not None:
                    peer = block[0].peer
                    if peer is not None and peer not in ready and self._can_send(peer):
                        ready.append(peer)  # a rendezvous: it has been waiting for this stage to come
                    break
                woken = self._run(stage, block)
                self.next[stage] += 1
                if woken is not None and woken not in ready:
                    ready.append(woken)
        if any(self.next[stage] < len(self.blocks[stage]) for stage in range(self.schedule.stages)):
            explain(self._stall())
        for (sender, receiver), channel in self.channels.items():
            if channel:
                raise ScheduleError(
                    f"{self.schedule.name}: stage {sender} sends what stage {receiver}'s order never "
                    f"takes with {channel[0][0]}"
                )
        return Timeline(self.schedule, tuple(tuple(spans) for spans in self.spans))

    def _waits_for(self, stage: int, block: tuple[Action, ...]) -> Waiting | None:
        """What keeps the stage from its next block; None: nothing."""
        action = block[0]
        if action.kind.is_receive:
            channel = self.channels.get((action.peer or 0, stage))
            if channel and channel[0][0] == action:
                return None
            arrived = channel[0][0] if channel else None
            return Waiting(action, action.peer or 0, send_of(self.schedule, action), arrived)
        if action.kind.is_send:
            made = (
                Kind.FORWARD if action.kind is Kind.SEND_ACTIVATION else Kind.BACKWARD_INPUT,
                *_place(action),
            )
            if made not in self.done[stage]:
                return Waiting(action, stage, Action(*made))
            if self.sends is Sends.BUFFERED or self._at_receive(action):
                return None
            return Waiting(action, action.peer or 0, receive_of(self.schedule, action))
        for part in block:
            for need in _needs(self.schedule, part):
                if need not in self.done[stage]:
                    return Waiting(part, stage, Action(*need))
        return None

    def _at_receive(self, send: Action) -> bool:
        """Whether the receiver of a rendezvous stands at its receive."""
        peer = send.peer or 0
        position = self.next[peer]
        reached = position < len(self.blocks[peer])
        return reached and self.blocks[peer][position][0] == receive_of(self.schedule, send)

    def _can_send(self, stage: int) -> bool:
        """Whether the stage stands at a send whose receiver has come."""
        position = self.next[stage]
        if position == len(self.blocks[stage]):
            return False
        block = self.blocks[stage][position]
        return block[0].kind.is_send and self._waits_for(stage, block) is None

    def _run(self, stage: int, block: tuple[Action, ...]) -> int | None:
        """Run a block; returns a stage that may go on because of it."""
        start_s, action = self.clock_s[stage], block[0]
        woken = None
        if action.kind.is_receive:
            sender = action.peer or 0
            _, arrives_s = self.channels[sender, stage].popleft()
            self.clock_s[stage] = max(start_s, arrives_s)
            if self.sends is Sends.RENDEZVOUS:
                woken = sender
        elif action.kind.is_send:
            woken = action.peer or 0
            self._send(stage, woken, action)
        else:
            self.clock_s[stage] = start_s + self.costs.block_s(stage, block)
        for part in block:
            self.spans[stage].append(Span(part, start_s, self.clock_s[stage]))
            self.done[stage].add((part.kind, *_place(part)))
            if part.kind is Kind.BACKWARD:  # it is both of its halves
                self.done[stage].add((Kind.BACKWARD_INPUT, *_place(part)))
        return woken

    def _send(self, stage: int, peer: int, action: Action) -> None:
        start_s = self.clock_s[stage]
        if self.sends is Sends.RENDEZVOUS:
            start_s = max(start_s, self.clock_s[peer])
        start_s = max(start_s, self.link_free_s.get((stage, peer), 0.0))
        self.link_free_s[stage, peer] = left_s = start_s + self.costs.transfer_s
        arrives_s = left_s + self.costs.link.latency_s
        if self.sends is Sends.RENDEZVOUS:
            self.clock_s[stage] = arrives_s
        channel = self.channels.setdefault((stage, peer), deque())
        channel.append((receive_of(self.schedule, action), arrives_s))

    def _stall(self) -> Stall:
        heads = {
            stage: waiting
            for stage in range(self.schedule.stages)
            if self.next[stage] < len(self.blocks[stage])
            and (waiting := self._waits_for(stage, self.blocks[stage][self.next[stage]])) is not None
        }
        rest = [
            [action for block in self.blocks[stage][self.next[stage] :] for action in block]
            for stage in range(self.schedule.stages)
        ]
        return Stall(self.schedule, self.sends.value, heads, rest)


def _place(action: Action) -> tuple[int, int, int]:
    return action.micro_batch, action.chunk, action.direction


def _needs(schedule: PipelineSchedule, action: Action) -> tuple[Key, ...]:
    """What a compute action needs to have happened on its own stage: receives and compute."""
    batch, chunk, way = _place(action)
    if action.kind is Kind.BACKWARD_WEIGHT:
        return ((Kind.BACKWARD_INPUT, batch, chunk, way),)
    stage = schedule.stage_of(chunk, way)
    if action.kind is Kind.FORWARD:
        if chunk == 0:
            return ()
        if schedule.stage_of(chunk - 1, way) == stage:
            return ((Kind.FORWARD, batch, chunk - 1, way),)
        return ((Kind.RECEIVE_ACTIVATION, batch, chunk, way),)
    forward = (Kind.FORWARD, batch, chunk, way)
    if chunk == schedule.chunks - 1:
        return (forward,)
    if schedule.stage_of(chunk + 1, way) == stage:
        return (forward, (Kind.BACKWARD_INPUT, batch, chunk + 1, way))
    return (forward, (Kind.RECEIVE_GRADIENT, batch, chunk, way))
