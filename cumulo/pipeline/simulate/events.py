"""The event loop of a pipeline in virtual time: every stage goes through its order as soon as it has what it needs.

`simulate` keeps every action's times, for checks and pictures; the planner asks for a thousand makespans. Both play
a `Program`, the schedule as numbers, which can be played again with other costs.
"""

from collections import deque
from dataclasses import dataclass

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, Sends, blocks
from cumulo.pipeline.decide.costs import Costs
from cumulo.pipeline.decide.orders import ScheduleError

_MOST_TOLD = 16  # stages of a deadlock
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
    works: tuple[ActionBlock, ...]  # the computations that differ; the first is none
    slots: int


def makespan_s(program: Program, costs: Costs) -> float:
    return max((ends[-1] for ends in play(program, costs) if ends), default=0.0)


def played_blocks(schedule: PipelineSchedule, costs: Costs) -> list[list[tuple[ActionBlock, float, float]]]:
    """The blocks of compute actions of each stage, with their starts and ends."""
    program = compile_schedule(schedule)
    return [
        [(block, end_s - costs.block_s(block), end_s) for block, end_s in zip(mine, ends, strict=True)]
        for mine, ends in zip(program.blocks, play(program, costs), strict=True)
    ]


def play(program: Program, costs: Costs) -> list[list[float]]:
    """When each stage ends each of its blocks. A schedule that cannot be played to its end is refused."""
    seconds = [costs.block_s(block) for block in program.works]
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
        raise _deadlock(program, [len(mine) for mine in ends])
    return ends


def _deadlock(program: Program, reached: list[int]) -> ScheduleError:
    stands = [
        f"stage {stage} stands at {mine[at][0]}"
        for stage, (mine, at) in enumerate(zip(program.blocks, reached, strict=True))
        if at < len(mine)
    ]
    more = f"; and {len(stands) - _MOST_TOLD} more" if len(stands) > _MOST_TOLD else ""
    where = "; ".join(stands[:_MOST_TOLD]) + more
    return ScheduleError(
        f"{program.schedule.name}: deadlock with {program.sends.value} sends: {where}; each waits for another, for "
        "ever"
    )


def compile_schedule(schedule: PipelineSchedule, sends: Sends = Sends.BUFFERED) -> Program:
    """A schedule with its sends and receives, or of compute actions only: their messages then leave as soon as they
    are made and are waited for where they are needed."""
    return _Compiler(schedule, sends).program()


class _Compiler:
    """Numbers the slots. What a stage needs of itself is there by its order (`decide/orders.py`): nothing waits for
    it."""

    def __init__(self, schedule: PipelineSchedule, sends: Sends) -> None:
        self.schedule, self.sends = schedule, sends
        self.last = schedule.chunks - 1
        # A slot for each activation and each gradient that a chunk is given, and one more that a receiver has come
        # for it.
        self.gradients = schedule.directions * (schedule.chunks + 2) * schedule.micro_batches
        self.receivers = 2 * self.gradients
        self.works: dict[tuple[object, ...], int] = {}
        self.work_blocks: list[ActionBlock] = [()]

    def program(self) -> Program:
        orders = tuple(tuple(blocks(order)) for order in self.schedule.orders)
        steps = tuple(
            tuple(self._step(stage, block) for block in order) for stage, order in enumerate(orders)
        )
        return Program(self.schedule, self.sends, orders, steps, tuple(self.work_blocks), 4 * self.gradients)

    def _slot(self, action: Action, chunk: int, gradient: bool) -> int:
        place = action.direction * (self.last + 3) + chunk + 1
        return place * self.schedule.micro_batches + action.micro_batch + (self.gradients if gradient else 0)

    def _step(self, stage: int, block: ActionBlock) -> Step:
        action, rendezvous = block[0], self.sends is Sends.RENDEZVOUS
        if action.kind.is_compute:
            waits: list[int] = []
            posts: list[tuple[int, int, int]] = []
            if not self.schedule.has_communication:
                for part in block:
                    self._add_messages(stage, part, waits, posts)
            return (), tuple(waits), self._work(block), tuple(posts), False
        peer, slot = action.peer or 0, self._message(action)
        if action.kind.is_receive:
            return ((self.receivers + slot, peer),) if rendezvous else (), (slot,), 0, (), False
        message = (slot, stage * self.schedule.stages + peer, peer)
        return (), (self.receivers + slot,) if rendezvous else (), 0, (message,), rendezvous

    def _message(self, action: Action) -> int:
        """The slot of a send's or a receive's message, which is that of the chunk it is for."""
        gradient = action.kind in (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
        ahead = (-1 if gradient else 1) if action.kind.is_send else 0
        return self._slot(action, action.chunk + ahead, gradient)

    def _work(self, block: ActionBlock) -> int:
        """The number of a block's computation: alike for all its micro-batches."""
        key = tuple([(part.kind, part.chunk) for part in block])
        work = self.works.get(key)
        if work is None:
            work = self.works[key] = len(self.work_blocks)
            self.work_blocks.append(block)
        return work

    def _add_messages(
        self, stage: int, action: Action, waits: list[int], posts: list[tuple[int, int, int]]
    ) -> None:
        """Without sends and receives, what another stage makes is waited for, and what it needs is posted."""
        if action.kind is Kind.BACKWARD_WEIGHT:
            return
        forward = action.kind is Kind.FORWARD
        ahead = 1 if forward else -1
        before, after = action.chunk - ahead, action.chunk + ahead
        if 0 <= before <= self.last and self.schedule.stage_of(before, action.direction) != stage:
            waits.append(self._slot(action, action.chunk, not forward))
        if 0 <= after <= self.last and (peer := self.schedule.stage_of(after, action.direction)) != stage:
            slot = self._slot(action, after, not forward)
            posts.append((slot, stage * self.schedule.stages + peer, peer))
