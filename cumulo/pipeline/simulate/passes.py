"""A pipeline's passes in virtual time on a machine with fewer cores than it has use for: a pass computes, exchanges
with the other ranks of its stage (experts' tokens), computes on. Cores are shared by all who compute; a rank's
card, if that bounds the rate, by its passes that exchange at the same time. `cumulo bench overlap` predicts with it
what a pipeline saves by computing pairs at the same time.

    step_s = play_passes(schedule, costs, PassMachine(cores=2, copies=2, bytes_per_s=1e8), together=True)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cumulo.errors import InvalidRequest
from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, blocks

_DONE = 1e-12


@dataclass(frozen=True, slots=True)
class PassCost:
    """What a pass does in turn: it computes for some seconds of a core, then sends so many bytes, and so on; what
    comes last sends nothing."""

    parts: tuple[tuple[float, float], ...]


PassKey = tuple[Kind, int, int, int]  # kind, micro-batch, chunk, direction


def pass_key(action: Action) -> PassKey:
    return action.kind, action.micro_batch, action.chunk, action.direction


# Each pass has its own: a pair lasts as long as the longer of the two, so that means would say too little.
PassCosts = Mapping[PassKey, PassCost]


@dataclass(frozen=True, slots=True)
class PassMachine:
    cores: float
    copies: int  # of the pipeline on these cores, all in step: data-parallel ranks
    bytes_per_s: float  # of a rank's card, or of each connection
    each_connection: bool = False
    exchange_s: float = 0.0  # of an exchange, besides its bytes


@dataclass(slots=True)
class _Pass:
    """A pass under way."""

    stage: int
    action: Action
    left: list[tuple[float, float]]  # parts not yet begun
    compute_s: float = 0.0  # of the present part, to be done
    wait_s: float = 0.0
    bytes: float = 0.0

    @property
    def computes(self) -> bool:
        return self.compute_s > _DONE

    @property
    def sends(self) -> bool:
        return not self.computes and self.wait_s <= _DONE and self.bytes > _DONE

    @property
    def ended(self) -> bool:
        return not (self.left or self.computes or self.wait_s > _DONE or self.bytes > _DONE)


def play_passes(schedule: PipelineSchedule, costs: PassCosts, machine: PassMachine, together: bool) -> float:
    """Seconds of a step. `together`: a pair that the schedule overlaps runs at the same time; otherwise its forward
    comes after its backward, or before, as the order says. Messages between stages leave when the whole pair has
    ended, as the player sends them, and take no time."""
    return _Play(schedule, costs, machine, together).run()


class _Play:
    def __init__(
        self, schedule: PipelineSchedule, costs: PassCosts, machine: PassMachine, together: bool
    ) -> None:
        self.schedule, self.costs, self.machine = schedule, costs, machine
        self.together = together
        self.queues = [list(blocks(schedule.compute_order(stage)))[::-1] for stage in range(schedule.stages)]
        self.waiting: list[list[Action]] = [[] for _ in self.queues]  # of the present block: not begun
        self.done: list[list[Action]] = [[] for _ in self.queues]  # ... and ended; sent when all of it has
        self.running: list[_Pass] = []
        # What chunks have been given: (gradient, direction, micro-batch, chunk).
        self.made: set[tuple[bool, int, int, int]] = set()
        self.now = 0.0

    def run(self) -> float:
        while any(self.queues) or any(self.waiting) or self.running:
            self._begin()
            if not self.running:
                raise InvalidRequest(
                    f"{self.schedule.name} cannot be played: all stages wait for one another"
                )
            self._advance()
        return self.now

    def _begin(self) -> None:
        busy = {one.stage for one in self.running}
        for stage, queue in enumerate(self.queues):
            if stage not in busy and not self.waiting[stage] and queue:
                self.waiting[stage] = list(queue.pop())
            next_ones = self.waiting[stage] if self.together else self.waiting[stage][: stage not in busy]
            for action in [action for action in next_ones if self._ready(action)]:
                self.waiting[stage].remove(action)
                parts = list(self.costs[pass_key(action)].parts)
                self.running.append(_Pass(stage, action, parts))
        for one in self.running:
            self._next_part(one)

    def _ready(self, action: Action) -> bool:
        if action.kind is Kind.BACKWARD_WEIGHT:
            return True
        backward = action.kind is not Kind.FORWARD
        first = self.schedule.chunks - 1 if backward else 0
        key = (backward, action.direction, action.micro_batch, action.chunk)
        return action.chunk == first or key in self.made

    def _next_part(self, one: _Pass) -> None:
        while one.left and not (one.computes or one.wait_s > _DONE or one.bytes > _DONE):
            one.compute_s, one.bytes = one.left.pop(0)
            one.wait_s = self.machine.exchange_s if one.bytes > 0 else 0.0

    def _advance(self) -> None:
        """Advances to the next end of something."""
        computing = sum(one.computes for one in self.running) * self.machine.copies
        speed = min(1.0, self.machine.cores / computing) if computing else 1.0
        cards: dict[int, int] = {}
        for one in self.running:
            cards[one.stage] = cards.get(one.stage, 0) + one.sends
        rate_s, alone = self.machine.bytes_per_s, self.machine.each_connection
        rates = [rate_s / (1 if alone else cards[one.stage]) if one.sends else 0.0 for one in self.running]
        step_s = min(
            (
                one.compute_s / speed if one.computes else one.bytes / rate if one.sends else one.wait_s
                for one, rate in zip(self.running, rates, strict=True)
                if not one.ended
            ),
            default=0.0,
        )
        for one, rate in zip(self.running, rates, strict=True):
            if one.computes:
                one.compute_s -= step_s * speed
            elif one.sends:
                one.bytes = (
                    max(0.0, one.bytes - step_s * rate) if one.bytes > step_s * rate * (1 + 1e-9) else 0.0
                )
            else:
                one.wait_s -= step_s
        self.now += step_s
        for one in [one for one in self.running if one.ended]:
            self.running.remove(one)
            self.done[one.stage].append(one.action)
        busy = {one.stage for one in self.running}
        for stage, ended in enumerate(self.done):
            if ended and stage not in busy and not self.waiting[stage]:
                for action in ended:
                    self._hand_on(action)
                ended.clear()

    def _hand_on(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self.made.add((False, action.direction, action.micro_batch, action.chunk + 1))
        elif action.kind.gives_input_gradient:
            self.made.add((True, action.direction, action.micro_batch, action.chunk - 1))
