"""The event loop of a pipeline in virtual time: every stage goes through its order as soon as it has what it needs.

`simulate` keeps every action's times, for checks and pictures; the planner asks for a thousand makespans. Both play
a `Program`, the schedule as numbers, which can be played again with other costs.
"""

from collections import deque
from dataclasses import dataclass

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, Sends, blocks
from cumulo.pipeline.decide.costs import Costs
from cumulo.pipeline.decide.stall import explain

ActionBlock = tuple[Action, ...]
# (what it announces before it waits, what it waits for, its work, the messages it posts, whether it waits for their
# arrival). A message is (slot, link, the stage that may wait for it); slots hold when something is there.
Step = tuple[tuple[tuple[int, int], ...], tuple[int, ...], int, tuple[tuple[int, int, int], ...], bool]


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule as numbers. Each step is one block of a stage's order."""

    schedule: PipelineSchedule
    sends: Sends
    blocks: tuple[tuple[ActionBlock, ...], ...]  # of each stage
    steps: tuple[tuple[Step, ...], ...]  # of each stage
    works: tuple[
        tuple[int, ActionBlock], ...
    ]  # (stage, block): the computations that differ; the first is none
    slots: int


def makespan_s(program: Program, costs: Costs) -> float:
    return max((ends[-1] for ends in play(program, costs) if ends), default=0.0)


def played_blocks(schedule: PipelineSchedule, costs: Costs) -> list[list[tuple[ActionBlock, float, float]]]:
    """The blocks of compute actions of each stage, with their starts and ends."""
    program = compile_schedule(schedule)
    return [
        [(block, end_s - costs.block_s(stage, block), end_s) for block, end_s in zip(mine, ends, strict=True)]
        for stage, (mine, ends) in enumerate(zip(program.blocks, play(program, costs), strict=True))
    ]


def play(program: Program, costs: Costs) -> list[list[float]]:
    """When each stage ends each of its blocks. A schedule that cannot be played to its end is refused."""
    seconds = [costs.block_s(stage, block) for stage, block in program.works]
    transfer_s, latency_s = costs.transfer_s, costs.link.latency_s
    stages = len(program.steps)
    there: list[float | None] = [None] * program.slots
    link_free_s = [0.0] * (stages * stages)
    ends: list[list[float]] = [[] for _ in range(stages)]
    waiting = [False] * stages
    # A stage goes as far as it can; what it posts may let another go on. In which order stages are taken changes
    # nothing: every link has one sender and one receiver, each with a fixed order.
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        steps, mine = program.steps[stage], ends[stage]
        now = mine[-1] if mine else 0.0
        for position in range(len(mine), len(steps)):
            announces, waits, work, posts, holds = steps[position]
            for slot, peer in announces:
                if there[slot] is None:
                    there[slot] = now
                    if waiting[peer]:
                        waiting[peer] = False
                        ready.append(peer)
            for slot in waits:
                at = there[slot]
                if at is None:
                    waiting[stage] = True
                    break
                if at > now:
                    now = at
            if waiting[stage]:
                break
            now += seconds[work]
            for slot, link, peer in posts:
                free_s = link_free_s[link]
                link_free_s[link] = left_s = (now if now > free_s else free_s) + transfer_s
                there[slot] = arrives_s = left_s + latency_s
                if waiting[peer]:
                    waiting[peer] = False
                    ready.append(peer)
                if holds:
                    now = arrives_s
            mine.append(now)
    if any(len(mine) < len(steps) for mine, steps in zip(ends, program.steps, strict=True)):
        explain(program.schedule, program.sends, program.blocks, [len(mine) for mine in ends])
    return ends


def compile_schedule(schedule: PipelineSchedule, sends: Sends = Sends.BUFFERED) -> Program:
    """A schedule with its sends and receives, or of compute actions only: their messages then leave as soon as they
    are made and are waited for where they are needed."""
    return _Compiler(schedule, sends).program()


class _Compiler:
    """Numbers the slots. What a stage needs of itself is there or not by its order alone: no slot is waited for."""

    def __init__(self, schedule: PipelineSchedule, sends: Sends) -> None:
        self.schedule, self.sends = schedule, sends
        self.explicit = schedule.has_communication
        self.last = schedule.chunks - 1
        # A slot for each activation and each gradient that a chunk is given, one more that a receiver has come for
        # it, and one that is never filled.
        self.gradients = schedule.directions * (schedule.chunks + 2) * schedule.micro_batches
        self.receivers = 2 * self.gradients
        self.never = 4 * self.gradients
        self.sent = self._sent() if self.explicit else {}
        self.works: dict[tuple[object, ...], int] = {}
        self.work_blocks: list[tuple[int, ActionBlock]] = [(0, ())]

    def program(self) -> Program:
        orders = tuple(tuple(blocks(order)) for order in self.schedule.orders)
        steps = tuple(self._stage(stage, order) for stage, order in enumerate(orders))
        return Program(self.schedule, self.sends, orders, steps, tuple(self.work_blocks), self.never + 1)

    def _slot(self, action: Action, chunk: int, gradient: bool) -> int:
        place = action.direction * (self.last + 3) + chunk + 1
        return place * self.schedule.micro_batches + action.micro_batch + (self.gradients if gradient else 0)

    def _sent(self) -> dict[tuple[int, int], deque[int]]:
        """(from, to) -> the messages of a link, in their order."""
        sent: dict[tuple[int, int], deque[int]] = {}
        for stage, order in enumerate(self.schedule.orders):
            for action in order:
                if action.kind.is_send:
                    sent.setdefault((stage, action.peer or 0), deque()).append(self._message(action))
        return sent

    def _message(self, action: Action) -> int:
        """The slot of a send's or a receive's message, which is that of the chunk it is for."""
        gradient = action.kind in (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
        ahead = (-1 if gradient else 1) if action.kind.is_send else 0
        return self._slot(action, action.chunk + ahead, gradient)

    def _stage(self, stage: int, order: tuple[ActionBlock, ...]) -> tuple[Step, ...]:
        made: set[tuple[Kind, int]] = set()  # on this stage, by its order: (what, slot of the chunk's input)
        steps: list[Step] = []
        for block in order:
            action = block[0]
            if action.kind.is_receive:
                steps.append(self._receive(stage, action))
                made.add((action.kind, self._slot(action, action.chunk, False)))
                continue
            if action.kind.is_send:
                steps.append(self._send(stage, action, made))
                continue
            waits: list[int] = []
            posts: list[tuple[int, int, int]] = []
            for part in block:
                self._compute(stage, part, made, waits, posts)
            for part in block:
                own = self._slot(part, part.chunk, False)
                made.add((part.kind, own))
                if part.kind is Kind.BACKWARD:  # it is both of its halves
                    made.add((Kind.BACKWARD_INPUT, own))
            steps.append(((), tuple(waits), self._work(stage, block), tuple(posts), False))
        return tuple(steps)

    def _work(self, stage: int, block: ActionBlock) -> int:
        """The number of a block's computation: alike for all its micro-batches."""
        key = (stage, *[(part.kind, part.chunk) for part in block])
        work = self.works.get(key)
        if work is None:
            work = self.works[key] = len(self.work_blocks)
            self.work_blocks.append((stage, block))
        return work

    def _receive(self, stage: int, action: Action) -> Step:
        sender, slot = action.peer or 0, self._message(action)
        channel = self.sent.get((sender, stage))
        in_turn = channel is not None and len(channel) > 0 and channel[0] == slot
        if channel and in_turn:
            channel.popleft()
        come = ((self.receivers + slot, sender),) if self.sends is Sends.RENDEZVOUS else ()
        return come, (slot if in_turn else self.never,), 0, (), False

    def _send(self, stage: int, action: Action, made: set[tuple[Kind, int]]) -> Step:
        peer, slot = action.peer or 0, self._message(action)
        what = Kind.FORWARD if action.kind is Kind.SEND_ACTIVATION else Kind.BACKWARD_INPUT
        waits: tuple[int, ...] = ()
        if (what, self._slot(action, action.chunk, False)) not in made:
            waits = (self.never,)
        elif self.sends is Sends.RENDEZVOUS:
            waits = (self.receivers + slot,)
        message = (slot, stage * self.schedule.stages + peer, peer)
        return (), waits, 0, (message,), self.sends is Sends.RENDEZVOUS

    def _compute(
        self,
        stage: int,
        action: Action,
        made: set[tuple[Kind, int]],
        waits: list[int],
        posts: list[tuple[int, int, int]],
    ) -> None:
        """What it needs has been received or made, or never comes. Without receives, what another stage makes is
        waited for, and what another stage needs is posted."""
        own = self._slot(action, action.chunk, False)
        if action.kind is Kind.BACKWARD_WEIGHT:
            if (Kind.BACKWARD_INPUT, own) not in made:
                waits.append(self.never)
            return
        forward = action.kind is Kind.FORWARD
        if not forward and (Kind.FORWARD, own) not in made:
            waits.append(self.never)
        ahead = 1 if forward else -1
        before, after = action.chunk - ahead, action.chunk + ahead
        if 0 <= before <= self.last:
            if self.schedule.stage_of(before, action.direction) == stage:
                what = Kind.FORWARD if forward else Kind.BACKWARD_INPUT
                there = (what, self._slot(action, before, False)) in made
            elif self.explicit:
                there = (Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT, own) in made
            else:
                waits.append(self._slot(action, action.chunk, not forward))
                there = True
            if not there:
                waits.append(self.never)
        if not self.explicit and 0 <= after <= self.last:
            peer = self.schedule.stage_of(after, action.direction)
            if peer != stage:
                slot = self._slot(action, after, not forward)
                posts.append((slot, stage * self.schedule.stages + peer, peer))
