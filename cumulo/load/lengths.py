"""How long prompts and answers are: constant, uniform, normal, lognormal, or drawn from a file. Pure.

Called by `schedule.plan` with a seeded generator; `parse_lengths` reads what users type.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cumulo.errors import CumuloError
from cumulo.load.units import parse_count, parse_number

HELP = "128 · uniform:64-256 · normal:MEAN,SD[,MAX] · lognormal:MEDIAN,SIGMA[,MAX] · file:LENGTHS.txt"


class Lengths(Protocol):
    """A distribution over whole numbers of at least 1."""

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: int

    def __str__(self) -> str:
        return str(self.value)

    def draw(self, rng: random.Random) -> int:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Normal:
    """Truncated: what falls outside 1..most is drawn again, not moved to the edge."""

    mean: float
    deviation: float
    most: int | None = None

    def __str__(self) -> str:
        return f"{self.mean:g} ± {self.deviation:g}{_at_most(self.most)}"

    def draw(self, rng: random.Random) -> int:
        return _first_within(self.most, lambda: round(rng.gauss(self.mean, self.deviation)), str(self))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """What real prompts look like: many short, few very long. Truncated like `Normal`."""

    median: float
    sigma: float
    most: int | None = None

    def __str__(self) -> str:
        return f"lognormal around {self.median:g}, σ {self.sigma:g}{_at_most(self.most)}"

    def draw(self, rng: random.Random) -> int:
        return _first_within(
            self.most, lambda: max(1, round(self.median * rng.lognormvariate(0.0, self.sigma))), str(self)
        )


@dataclass(frozen=True, slots=True)
class Empirical:
    """Drawn, with repetition, from lengths seen elsewhere."""

    values: tuple[int, ...]

    def __str__(self) -> str:
        return f"drawn from {len(self.values):,} of {min(self.values)} to {max(self.values)}"

    def draw(self, rng: random.Random) -> int:
        return rng.choice(self.values)


def _at_most(most: int | None) -> str:
    return "" if most is None else f", at most {most}"


def _first_within(most: int | None, draw: Callable[[], int], distribution: str) -> int:
    """The first draw in 1..most; a distribution that has almost nothing there is the user's to fix."""
    for _ in range(10_000):
        value = draw()
        if value >= 1 and (most is None or value <= most):
            return value
    raise CumuloError(f"a length of {distribution} hardly ever lies in 1..{most}; narrow its spread")


def parse_lengths(text: str, what: str) -> Lengths:
    """A distribution in the notation of HELP; `what` names the option in errors."""
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        return Constant(parse_count(kind, what))
    match kind.lower():
        case "uniform":
            low, dash, high = rest.partition("-")
            if not dash:
                raise _unreadable(text, what)
            result = Uniform(parse_count(low, what), parse_count(high, what))
            if result.low > result.high:
                raise CumuloError(f"{what}: the range {rest} ends before it begins")
            return result
        case "normal":
            mean, deviation, most = _shape(text, rest, what)
            return Normal(mean, deviation, most)
        case "lognormal":
            median, sigma, most = _shape(text, rest, what)
            return LogNormal(median, sigma, most)
        case "file":
            return Empirical(_read_lengths(Path(rest), what))
    raise _unreadable(text, what)


def _shape(text: str, rest: str, what: str) -> tuple[float, float, int | None]:
    parts = rest.split(",")
    if len(parts) not in (2, 3):
        raise _unreadable(text, what)
    centre = parse_number(parts[0], f"the centre of {what}", least=1)
    spread = parse_number(parts[1], f"the spread of {what}")
    most = parse_count(parts[2], f"the largest {what}") if len(parts) == 3 else None
    if most is not None and most < centre:
        raise CumuloError(f"{what}: the largest length {most} lies below the centre {centre:g}; raise it")
    return centre, spread, most


def _read_lengths(path: Path, what: str) -> tuple[int, ...]:
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise CumuloError(f"{what}: cannot read the lengths in {path}: {error}") from error
    if not words:
        raise CumuloError(f"{what}: {path} holds no lengths; write one whole number per line")
    return tuple(parse_count(word, f"a length in {path}") for word in words)


def _unreadable(text: str, what: str) -> CumuloError:
    return CumuloError(f"{what} must be one of {HELP}; got {text!r}")
