"""Promises: how long steps may be, and what those who wait for a first token can expect. Owned by
`SloScheduling`, from the first request on that has an SLO.

A step may take as long as the strictest ITL of those who decode, less the error of the learnt StepModel: what
decoding leaves of that is spent on prompts, earliest deadline first (Liu and Layland 1973). So a request is
admitted exactly if all deadlines hold in that order.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from math import sqrt
from typing import NamedTuple

from cumulo.engine.decide.core.request import Request, Sequence, State
from cumulo.engine.decide.plan import StepPlan
from cumulo.spec.slo import Slo

_DECAY = 0.995  # per step: about the last 200 count
_RIDGE = 1e-6
_LEAST_WEIGHT = 0.05  # of a short step, next to one as long as it may be
_SURPRISE = 0.1  # a step that took so much more or less than expected is learnt from at once
_KNOWN_AFTER = 8  # steps with prompts
_WINDOW = 256  # steps whose errors are remembered
_TRUSTED_AFTER = 32  # long steps; before, they are expected to take
_CAUTION = 1.2  # times what the model says, ...
_LEAST_CAUTION = 1.05  # ... and later at least times this: a mix that was not seen lately may take longer
_MOST_ERROR = 1.5  # a machine that stood still says nothing about the next step


class StepMix(NamedTuple):
    rows: int = 0
    context: int = 0
    prompt_tokens: int = 0
    pairs: int = 0

    def features(self) -> tuple[float, ...]:
        """Scaled so that all are of about the same size."""
        return 1.0, self.rows / 64, self.context / 65536, self.prompt_tokens / 512, self.pairs / (512 * 2048)


_SIZE = len(StepMix().features())


class StepModel:
    def __init__(self) -> None:
        self.weights = [0.0] * _SIZE
        self._moments = [[0.0] * (_SIZE + 1) for _ in range(_SIZE)]
        self._steps = self._with_prompts = 0
        self._errors: deque[float] = deque(maxlen=_WINDOW)
        self._slower = _CAUTION

    @property
    def known(self) -> bool:
        """Whether it has seen enough to be asked."""
        return self._with_prompts >= _KNOWN_AFTER

    @property
    def slower(self) -> float:
        """What nearly all steps stay below, over what the model says."""
        return self._slower

    def observe(self, shape: StepMix, seconds: float, aimed_s: float) -> None:
        """`aimed_s`: how long a step may take. Much shorter ones matter little: memory bounds them, and there a few
        prompt tokens cost next to nothing. Errors of steps in which nobody decodes say nothing about an ITL."""
        if seconds <= 0:
            return
        self._steps += 1
        if self.known and not shape.prompt_tokens and self._steps % 4:
            return  # such steps come by the thousand, one like the other
        expected_s = self.seconds(shape)
        surprised = self.known and abs(seconds - expected_s) > _SURPRISE * seconds
        if self.known and shape.rows and seconds > 0.4 * aimed_s and expected_s > 0:
            self._errors.append(min(_MOST_ERROR, seconds / expected_s))
        features, weight = shape.features(), min(1.0, max(_LEAST_WEIGHT, seconds / aimed_s))
        for row, one in zip(self._moments, features, strict=True):
            weighted = weight * one / seconds
            for column, other in enumerate(features):
                row[column] = _DECAY * row[column] + weighted * other
            row[_SIZE] = _DECAY * row[_SIZE] + weight * one
        self._with_prompts += shape.prompt_tokens > 0
        if self._steps % 8 == 0 or not self.known or surprised:
            self.weights = _fit(self._moments)
            least = _LEAST_CAUTION if len(self._errors) >= _TRUSTED_AFTER else _CAUTION
            self._slower = max(least, max(self._errors, default=least))

    def seconds(self, shape: StepMix) -> float:
        return sum(weight * one for weight, one in zip(self.weights, shape.features(), strict=True))

    def decode_s(self, rows: int, context: int) -> float:
        """The time of a step without prompts."""
        return self.seconds(StepMix(rows, context))

    def prompt_s(self, start: int, tokens: int) -> float:
        """What tokens [start, start + tokens) of a prompt add to a step."""
        per_token, per_pair = self._prompt_rates
        return tokens * (per_token + per_pair * (start + (tokens + 1) / 2))

    def tokens_within(self, seconds: float, start: int) -> int:
        """The other way round: how many tokens from `start` on add so many seconds."""
        per_token, per_pair = self._prompt_rates
        linear = per_token + per_pair * (start + 0.5)
        if seconds <= 0 or linear <= 0:
            return 0 if seconds <= 0 else 1 << 30
        # The root of a quadratic, in the form that does not subtract two numbers that are nearly the same.
        return int(2 * seconds / (linear + sqrt(linear * linear + 2 * per_pair * seconds)))

    @property
    def _prompt_rates(self) -> tuple[float, float]:
        return self.weights[3] / 512, self.weights[4] / (512 * 2048)


def _fit(moments: list[list[float]]) -> list[float]:
    """Least squares without negative coefficients: what would be negative is left out, the worst first."""
    used = [index for index in range(_SIZE) if moments[index][index] > 0]
    while used:
        found = _solve(moments, used)
        worst = min(found)
        if worst >= 0:
            weights = [0.0] * _SIZE
            for index, value in zip(used, found, strict=True):
                weights[index] = value
            return weights
        del used[found.index(worst)]
    return [0.0] * _SIZE


def _solve(moments: list[list[float]], used: list[int]) -> list[float]:
    """The normal equations of these features, by Gaussian elimination; they are positive definite."""
    rows = [[moments[i][j] * (1 + _RIDGE if i == j else 1) for j in used] + [moments[i][_SIZE]] for i in used]
    count = len(used)
    for pivot in range(count):
        top = rows[pivot]
        for row in rows[pivot + 1 :]:
            factor = row[pivot] / top[pivot] if top[pivot] else 0.0
            for column in range(pivot, count + 1):
                row[column] -= factor * top[column]
    found = [0.0] * count
    for index in range(count - 1, -1, -1):
        rest = sum(rows[index][column] * found[column] for column in range(index + 1, count))
        found[index] = (rows[index][count] - rest) / rows[index][index] if rows[index][index] else 0.0
    return found


# Tokens of prompts that an engine computes to know its steps before it promises, the long ones only if they take no
# longer than this: long prompts cost more than their tokens say, and short ones do not show it.
_LEARNING_PROMPTS, _LONG_PROMPTS, _LONGEST_LEARNING_S = (16, 64, 128, 256), (1024, 4096, 16384), 0.5
_ITL_MARGIN = 0.96  # of the promised ITL: the host's part of a step varies, too
_STEPS_PER_TTFT = 6  # while nobody decodes a step is bounded by the TTFT that newcomers will want
_LEAST_TOKENS = 16  # of a prompt in a step, however little is left: prompts always get on
_LEARNING_TOKENS = 64  # of a step, until the model is known
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
        if not known.model.known or known.model.prompt_s(0, tokens) > most_s:
            return
        yield tokens


class _Planned(NamedTuple):
    shape: StepMix
    expected_s: float
    planned_s: float


class Promises:
    def __init__(self, default: Slo | None) -> None:
        self.default = default
        self.model = StepModel()
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
        """How long the model may say that a step takes."""
        bound_s = min(self._itls, default=self.default.itl_s if self.default is not None else None)
        if not self.rows or bound_s is None:
            ttft_s = min(self._ttfts, default=1.0)
            bound_s = max(bound_s or 0.0, ttft_s / _STEPS_PER_TTFT)
        return self.step_within(bound_s)

    def step_within(self, itl_s: float) -> float:
        """How long the model may say that a step takes which is to end within an ITL."""
        return itl_s * _ITL_MARGIN / self.model.slower

    def begin_step(self, plan: StepPlan) -> None:
        """The rows that draw one token each are planned."""
        self.rows, self.context = len(plan.slots), sum(plan.starts)
        self.left_s = self.step_s - self.model.decode_s(self.rows, self.context)
        self.step_full = False

    def prompt_room(self, rows: int, context: int) -> float:
        """The share of a step's time that so many sequences that decode leave to prompts, if they need it."""
        return 1 - self.model.decode_s(rows, context) / self.step_s

    def prompt_share(self, rows: int, context: int, start: int, most_tokens: int) -> float:
        """Of the time that steps take, what is spent on prompts while so many sequences decode."""
        decode_s = self.model.decode_s(rows, context)
        prompts_s = min(self.step_s - decode_s, self.model.prompt_s(start, max(1, most_tokens - rows)))
        return prompts_s / (decode_s + prompts_s) if prompts_s > 0 else 0.0

    def spend(self, sequence: Sequence, wanted: int, first: bool) -> int:
        """How many tokens of a prompt this step computes; the first prompt of a step always gets on."""
        most = _LEARNING_TOKENS
        if self.model.known:
            most = self.model.tokens_within(self.left_s, sequence.computed)
            most = max(_LEAST_TOKENS, most) if first else most
        count = min(wanted, most)
        self.left_s -= self.model.prompt_s(sequence.computed, count)
        self.step_full = count < wanted or (self.model.known and self.left_s <= 0)
        return count

    def draft_room(self) -> int:
        """Drafted tokens for which the step has time, next to the rows and prompts that are planned."""
        if not self.rows or not self.model.known:
            return 0
        return self.model.tokens_within(self.left_s, self.context // self.rows)

    def planned(self, plan: StepPlan, now_s: float) -> None:
        tokens = pairs = 0
        prompts = zip(plan.starts[self.rows :], plan.counts[self.rows :], strict=True)
        drafts = [(plan.starts[row] + 1, len(drafted)) for row, drafted in plan.drafts]
        for start, count in (*prompts, *drafts):
            tokens += count
            pairs += count * start + count * (count + 1) // 2
        shape = StepMix(self.rows, self.context, tokens, pairs)
        self._planned[plan.index] = _Planned(shape, self.model.seconds(shape), now_s)

    def observe(self, plan: StepPlan, draws: list[Sequence], now_s: float) -> None:
        """A step's result is here. Clients see the time since the result before, or since it was planned."""
        planned = self._planned.pop(plan.index, None)
        if planned is not None and plan.rounds is None:  # of several steps in one nothing is learnt about one
            seconds = now_s - max(self._last_result_s, planned.planned_s)
            self.model.observe(planned.shape, seconds, self.step_s)
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
