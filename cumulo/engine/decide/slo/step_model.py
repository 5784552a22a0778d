"""StepModel: how long a step takes, learnt from the steps that were played. Asked before a step is planned.

    seconds = fixed + a · rows + b · context + c · prompt tokens + d · query-key pairs of prompts

with coefficients of 0 or more, fitted by least squares on relative errors; older steps count less and less. `rows`
are sequences that draw one token, `context` is what they attend to.
"""

from collections import deque
from math import sqrt
from typing import NamedTuple

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
        """Of a step without prompts."""
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
