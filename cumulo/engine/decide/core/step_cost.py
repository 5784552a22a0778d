"""StepCost: how long a step takes, learned from the steps that were played. The scheduler feeds it once after each
step; preemption, sharing, SLOs, speculation, tiers, transfers and routers ask it.
"""

from collections import deque
from math import inf, sqrt
from typing import NamedTuple

from cumulo.engine.decide.plan import StepPlan

_LEARN = 0.5  # share of the news in the average: steps that took longer than expected,
_LEARN_LESS = 0.2  # ... and others
_MOST_LONGER = 4.0  # times as expected: a machine that stood still says nothing about the next step
_DRAFT_NEWS = 0.1  # at least, in the mean of what a drafted token takes
_DECAY = 0.995  # per step: about the last 200 count
_RIDGE = 1e-6
_LEAST_WEIGHT = 0.05  # of a short step, next to one as long as it may be
_SURPRISE = 0.1  # a step that took so much more or less than expected is learned from at once
_KNOWN_AFTER = 8  # steps with prompts
_WINDOW = 256  # steps whose errors are remembered
_TRUSTED_AFTER = 32  # long steps; before, they are expected to take
_CAUTION = 1.2  # times what is expected, ...
_LEAST_CAUTION = 1.05  # ... and later at least times this: a mix that was not seen lately may take longer
_MOST_ERROR = 1.5  # a machine that stood still says nothing about the next step


class StepMix(NamedTuple):
    """What a step computes, in numbers."""

    rows: int = 0  # that draw one token
    context: int = 0  # tokens before those
    prompt_tokens: int = 0  # of prompts and drafts
    pairs: int = 0  # of these tokens with each one that they attend to
    drafts: int = 0

    @staticmethod
    def from_plan(plan: StepPlan) -> "StepMix":
        if plan.tokens == len(plan.slots):
            return StepMix(len(plan.slots), sum(plan.starts))
        rows = context = tokens = pairs = 0
        drafted = {row: len(draft) for row, draft in plan.drafts}
        for row, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
            if count - drafted.get(row, 0) == 1:
                rows, context, start, count = rows + 1, context + start, start + 1, count - 1
            tokens += count
            pairs += count * start + count * (count + 1) // 2
        return StepMix(rows, context, tokens, pairs, sum(drafted.values()))

    def features(self) -> tuple[float, ...]:
        """Scaled so that all are of about the same size."""
        return 1.0, self.rows / 64, self.context / 65536, self.prompt_tokens / 512, self.pairs / (512 * 2048)


_SIZE = len(StepMix().features())


class StepCost:
    def __init__(self, shared_step_s: float = 0.04) -> None:
        self.shared_step_s = shared_step_s
        self.swap_s_per_block = 1e-4  # between the device and host memory; measured by the assembly
        self.forget()

    def forget(self) -> None:
        """Nothing is known of steps, as at the beginning."""
        self.s_per_row = self.shared_step_s / 4  # what many rows would take is not known
        self.prompt_s_per_token = 1e-3
        self.knows_rows = self.knows_prompts = False  # whether steps without and with prompts were measured
        self._draft_s, self._drafted = 0.0, 0  # mean over so many steps
        self.weights = [0.0] * _SIZE
        self._moments = [[0.0] * (_SIZE + 1) for _ in range(_SIZE)]  # the last column is that of the seconds
        self._steps = self._with_prompts = 0
        self._errors: deque[float] = deque(maxlen=_WINDOW)
        self.slower = _CAUTION  # what nearly all steps stay below, over what is expected

    def observe(self, mix: StepMix, seconds: float, aimed_s: float = inf) -> None:
        """`aimed_s`: how long a step may take, where somebody was promised so."""
        if mix.rows + mix.prompt_tokens == 0 or seconds <= 0:
            return
        if mix.prompt_tokens:
            self._observe_prompts(mix, seconds)
        else:
            self.observe_rows(mix.rows, seconds)
        if not mix.drafts:
            self._observe_mix(mix, seconds, aimed_s)
        elif mix.drafts == mix.prompt_tokens:
            self._observe_drafts(mix, seconds)

    # -- rows and prompts ---------------------------------------------------------------------------------
    def observe_rows(self, rows: int, seconds: float) -> None:
        """A step has a fixed part, so a short one with few rows says little about what more rows would take: only
        steps that are too long raise the estimate."""
        measured, self.knows_rows = seconds / rows, True
        if measured < self.s_per_row:
            self.s_per_row = max(measured, 1e-9)
        elif seconds > self.shared_step_s:
            self.s_per_row += _LEARN * (min(measured, _MOST_LONGER * self.s_per_row) - self.s_per_row)

    def _observe_prompts(self, mix: StepMix, seconds: float) -> None:
        rows, tokens, self.knows_prompts = mix.rows, mix.prompt_tokens, True
        if rows:
            self.s_per_row = min(self.s_per_row, seconds / rows)
        # A step's fixed part is among what its rows take; half of the time per token is the prompt's in any case.
        left_s = max(seconds - rows * self.s_per_row, seconds / 2 * tokens / (rows + tokens))
        measured = min(left_s / tokens, _MOST_LONGER * self.prompt_s_per_token)
        learn = _LEARN if measured > self.prompt_s_per_token else _LEARN_LESS
        self.prompt_s_per_token += learn * (measured - self.prompt_s_per_token)

    def rows_in(self, seconds: float) -> int:
        return max(1, int(seconds / self.s_per_row))

    def expected_s(self, rows: int, prompt_tokens: int) -> float:
        """How long a step of so many single tokens and tokens of prompts takes, at most."""
        return self.s_per_row * rows + self.prompt_s_per_token * prompt_tokens

    # -- drafts -------------------------------------------------------------------------------------------
    def _observe_drafts(self, mix: StepMix, seconds: float) -> None:
        plain_s, draft_s = self.decode_s(mix.rows, mix.context), self.draft_s(mix.rows, mix.context)
        measured = min(max(0.0, seconds - plain_s) / mix.drafts, 2 * draft_s)
        self._drafted += 1
        self._draft_s = draft_s + max(_DRAFT_NEWS, 1 / (self._drafted + 1)) * (measured - draft_s)

    def draft_s(self, rows: int, context: int) -> float:
        """What a drafted token adds to a step of so many rows. Before any was verified, that is as much as a token
        of a prompt, and no more than its share of the step: reading the weights costs as much as a token."""
        if self._drafted:
            return self._draft_s
        return min(self.prompt_s_per_token, self.decode_s(rows, context) / (rows + 1))

    # -- any mix ------------------------------------------------------------------------------------------
    def _observe_mix(self, mix: StepMix, seconds: float, aimed_s: float) -> None:
        """Least squares. Steps much shorter than `aimed_s` matter little: memory bounds them, and there tokens of a
        prompt cost next to nothing. Errors of steps in which nobody decodes say nothing about an ITL."""
        self._steps += 1
        if self.known and not mix.prompt_tokens and self._steps % 4:
            return  # such steps come by the thousand, one like the other
        expected_s = self.seconds(mix)
        surprised = self.known and abs(seconds - expected_s) > _SURPRISE * seconds
        if self.known and mix.rows and seconds > 0.4 * aimed_s and expected_s > 0:
            self._errors.append(min(_MOST_ERROR, seconds / expected_s))
        features, weight = mix.features(), min(1.0, max(_LEAST_WEIGHT, seconds / aimed_s))
        for row, one in zip(self._moments, features, strict=True):
            for column, other in enumerate((*features, seconds)):
                row[column] = _DECAY * row[column] + weight * one / seconds * other
        self._with_prompts += mix.prompt_tokens > 0
        if self._steps % 8 == 0 or not self.known or surprised:
            self.weights = _fit(self._moments)
            least = _LEAST_CAUTION if len(self._errors) >= _TRUSTED_AFTER else _CAUTION
            self.slower = max(least, max(self._errors, default=least))

    @property
    def known(self) -> bool:
        """Whether enough was seen to promise anything."""
        return self._with_prompts >= _KNOWN_AFTER

    def seconds(self, mix: StepMix) -> float:
        return sum(weight * one for weight, one in zip(self.weights, mix.features(), strict=True))

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
