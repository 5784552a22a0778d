"""Promises: how long steps may be, and what those who wait for a first token can expect. Owned by
`SloScheduling`, from the first request on that has an SLO.

A step may take as long as the strictest ITL of those who decode, less the error of the learned StepCost: what
decoding leaves of that is spent on prompts, earliest deadline first (Liu and Layland 1973). So a request is
admitted exactly if all deadlines hold in that order.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cumulo.engine.decide.core.request import Request, Sequence, State
from cumulo.engine.decide.core.step_cost import StepCost, StepMix
from cumulo.engine.decide.plan import StepPlan
from cumulo.spec.slo import Slo

# Tokens of prompts that an engine computes to know its steps before it promises, the long ones only if they take no
# longer than this: long prompts cost more than their tokens say, and short ones do not show it.
_LEARNING_PROMPTS, _LONG_PROMPTS, _LONGEST_LEARNING_S = (16, 64, 128, 256), (1024, 4096, 16384), 0.5
_ITL_MARGIN = 0.96  # of the promised ITL: the host's part of a step varies, too
_STEPS_PER_TTFT = 6  # while nobody decodes a step is bounded by the TTFT that newcomers will want
_LEAST_TOKENS = 16  # of a prompt in a step, however little is left: prompts always get on
_LEARNING_TOKENS = 64  # of a step, until its cost is known
_LEARN = 0.05


def learning_prompts(promises: "Callable[[], Promises | None]", max_context: int) -> Iterator[int]:
    """Lengths of prompts to compute, one after the other, before anyone is promised anything."""
    yield from (min(tokens, max_context // 2) for tokens in _LEARNING_PROMPTS)
    for tokens in _LONG_PROMPTS:
        known = promises()
        if known is None or tokens > max_context // 2:
            return
        ttft_s = known.default.ttft_s if known.default is not None else None
        most_s = _LONGEST_LEARNING_S if ttft_s is None else min(_LONGEST_LEARNING_S, ttft_s / 2)
        if not known.cost.known or known.cost.prompt_s(0, tokens) > most_s:
            return
        yield tokens


class _Planned(NamedTuple):
    expected_s: float
    planned_s: float


class Promises:
    def __init__(self, default: Slo | None, cost: StepCost) -> None:
        self.default, self.cost = default, cost
        self.waiting: dict[str, Request] = {}  # for their first token, promised or not
        self._uncached: dict[str, int] = {}
        self.rows = self.context = 0  # of the last plan: who decodes
        self.output_tokens = 256.0  # of a request, on average
        self.refused = 0
        self.left_s = 0.0  # of the step that is being planned, for prompts
        self.step_full = False  # its time ended before the prompts did
        self._itls: Counter[float] = Counter()
        self._ttfts: Counter[float] = Counter()
        self._planned: dict[int, _Planned] = {}
        self._last_result_s = float("-inf")

    # -- requests come and go -----------------------------------------------------------------------------
    def add(self, request: Request, tokens: int) -> None:
        """A request is in the queue, with so many tokens of its prompt in no cache."""
        self.waiting[request.id] = request
        self._uncached[request.id] = tokens
        promise = request.story.promise
        if promise is not None:
            if promise.itl_s is not None:
                self._itls[promise.itl_s] += 1
            if promise.ttft_s is not None:
                self._ttfts[promise.ttft_s] += 1

    def drop(self, request: Request) -> None:
        """It has ended."""
        self._answered(request)
        self.output_tokens += _LEARN * (request.story.output_tokens - self.output_tokens)
        promise = request.story.promise
        if promise is not None:
            _forget(self._itls, promise.itl_s)
            _forget(self._ttfts, promise.ttft_s)

    def _answered(self, request: Request) -> None:
        """It waits for its first token no more."""
        if self.waiting.pop(request.id, None) is not None:
            del self._uncached[request.id]

    def tokens_left(self, request: Request, uncached: int) -> int:
        """Of its prompt, to compute; `uncached`: of one that has not been taken."""
        sequence = request.sequences[0]
        if sequence.state == State.WAITING:
            return self._uncached.get(request.id, uncached)
        return max(0, sequence.to_compute)

    # -- steps --------------------------------------------------------------------------------------------
    @property
    def step_s(self) -> float:
        """How long a step may be expected to take."""
        bound_s = min(self._itls, default=self.default.itl_s if self.default is not None else None)
        if not self.rows or bound_s is None:
            ttft_s = min(self._ttfts, default=1.0)
            bound_s = max(bound_s or 0.0, ttft_s / _STEPS_PER_TTFT)
        return self.step_within(bound_s)

    def step_within(self, itl_s: float) -> float:
        """How long a step may be expected to take that is to end within an ITL."""
        return itl_s * _ITL_MARGIN / self.cost.slower

    def begin_step(self, plan: StepPlan) -> None:
        """The rows that draw one token each are planned."""
        self.rows, self.context = len(plan.slots), sum(plan.starts)
        self.left_s = self.step_s - self.cost.decode_s(self.rows, self.context)
        self.step_full = False

    def prompt_room(self, rows: int, context: int) -> float:
        """The share of a step's time that so many sequences that decode leave to prompts, if they need it."""
        return 1 - self.cost.decode_s(rows, context) / self.step_s

    def prompt_share(self, rows: int, context: int, start: int, most_tokens: int) -> float:
        """Of the time that steps take, what is spent on prompts while so many sequences decode."""
        decode_s = self.cost.decode_s(rows, context)
        prompts_s = min(self.step_s - decode_s, self.cost.prompt_s(start, max(1, most_tokens - rows)))
        return prompts_s / (decode_s + prompts_s) if prompts_s > 0 else 0.0

    def spend(self, sequence: Sequence, wanted: int, first: bool) -> int:
        """How many tokens of a prompt this step computes; the first prompt of a step always gets on."""
        most = _LEARNING_TOKENS
        if self.cost.known:
            most = self.cost.tokens_within(self.left_s, sequence.computed)
            most = max(_LEAST_TOKENS, most) if first else most
        count = min(wanted, most)
        self.left_s -= self.cost.prompt_s(sequence.computed, count)
        self.step_full = count < wanted or (self.cost.known and self.left_s <= 0)
        return count

    def draft_room(self) -> int:
        """Drafted tokens for which the step has time, next to the rows and prompts that are planned."""
        if not self.rows or not self.cost.known:
            return 0
        return self.cost.tokens_within(self.left_s, self.context // self.rows)

    def planned(self, plan: StepPlan, now_s: float) -> None:
        self._planned[plan.index] = _Planned(self.cost.seconds(StepMix.from_plan(plan)), now_s)

    def observe(self, plan: StepPlan, draws: list[Sequence], now_s: float) -> None:
        """A step's result is here."""
        self._planned.pop(plan.index, None)
        self._last_result_s = now_s
        for sequence in draws:
            if sequence.sample_index == 0 and sequence.state != State.FINISHED:
                request = sequence.request
                self._answered(request)
                if request.story.promise is not None:
                    request.story.promise.note_token(now_s)

    def in_flight_s(self, now_s: float) -> float:
        """The seconds until all planned steps are done."""
        expected_s = sum(one.expected_s for one in self._planned.values())
        began_s = min((one.planned_s for one in self._planned.values()), default=now_s)
        return max(0.0, expected_s - (now_s - max(began_s, self._last_result_s)))


def _forget(counts: Counter[float], value: float | None) -> None:
    if value is not None:
        counts[value] -= 1
        if not counts[value]:
            del counts[value]
