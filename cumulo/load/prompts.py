"""Synthetic prompts: how long they and their answers are (constant, uniform, normal, lognormal, or drawn from a
file), and their words: as many tokens as planned, never the same twice, the same for a seed. Pure.

Short common words are one token each in nearly every vocabulary; `Ruler` corrects for the rest, measured by the
probe. `schedule.plan` draws lengths, the player makes the words when a request is due, and `parse_lengths` reads
what users type.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cumulo.base.quantities import parse_count, parse_number
from cumulo.errors import CumuloError

HELP = "128 · uniform:64-256 · normal:MEAN,SD[,MAX] · lognormal:MEDIAN,SIGMA[,MAX] · file:LENGTHS.txt"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over whole numbers of at least 1."""

    shown: str
    draw: Callable[[random.Random], int] = field(compare=False)

    def __str__(self) -> str:
        return self.shown


def constant(value: int) -> Lengths:
    return Lengths(str(value), lambda rng: value)


def uniform(low: int, high: int) -> Lengths:
    return Lengths(f"{low} to {high}", lambda rng: rng.randint(low, high))


def normal(mean: float, deviation: float, most: int | None = None) -> Lengths:
    """Truncated: what falls outside 1..most is drawn again, not moved to the edge."""
    shown = f"{mean:g} ± {deviation:g}{_at_most(most)}"
    return Lengths(shown, lambda rng: _first_within(most, lambda: round(rng.gauss(mean, deviation)), shown))


def lognormal(median: float, sigma: float, most: int | None = None) -> Lengths:
    """What real prompts look like: many short, few very long. Truncated like `normal`."""
    shown = f"lognormal around {median:g}, σ {sigma:g}{_at_most(most)}"

    def draw_one(rng: random.Random) -> int:
        return max(1, round(median * rng.lognormvariate(0.0, sigma)))

    return Lengths(shown, lambda rng: _first_within(most, lambda: draw_one(rng), shown))


def empirical(values: tuple[int, ...]) -> Lengths:
    """Drawn, with repetition, from lengths seen elsewhere."""
    shown = f"drawn from {len(values):,} of {min(values)} to {max(values)}"
    return Lengths(shown, lambda rng: rng.choice(values))


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
        return constant(parse_count(kind, what))
    match kind.lower():
        case "uniform":
            low, dash, high = rest.partition("-")
            if not dash:
                raise _unreadable(text, what)
            bounds = parse_count(low, what), parse_count(high, what)
            if bounds[0] > bounds[1]:
                raise CumuloError(f"{what}: the range {rest} ends before it begins")
            return uniform(*bounds)
        case "normal":
            return normal(*_shape(text, rest, what))
        case "lognormal":
            return lognormal(*_shape(text, rest, what))
        case "file":
            return empirical(_read_lengths(Path(rest), what))
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


# One token each with a leading space in the usual BPE vocabularies.
_PROSE = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she "
    "many some so these would other into has more her two like him see time could no make than first been its "
    "who now people my made over did down only way find use may water long little very after words called just "
    "where most know get through back much before go good new write our used me man too any day same right "
    "look think also around another came come work three word must because does part even place well such here "
    "take why things help put years different away again off went old number great tell men say small every "
    "found still between name should home big give air line set own under read last never us left end along "
    "while might next sound below saw something thought both few those always looked show large often together "
    "asked house world going want school important until form food keep children feet land side without boy "
    "once animals life enough took sometimes four head above kind began almost live page got earth need far "
    "hand high year mother light parts country father let night following picture being study second eyes soon "
    "times story boys since white days ever paper hard near sentence better best across during today others "
    "however sure means knew try told young miles sun ways thing whole hear example heard several change answer "
    "room sea against top turned learn point city play toward five using himself usually money seen car morning "
    "given trees red real ice north book science black felt south open dark ball river body street fire summer"
)
WORDS = _PROSE.split()


@dataclass(frozen=True, slots=True)
class Ruler:
    """How many tokens a server counts for a prompt: `overhead_tokens + words × tokens_per_word`."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0  # the chat template and special tokens
    measured: bool = False

    def words_for(self, tokens: int, with_overhead: bool = True) -> int:
        """How many words make a prompt of so many tokens (at least one word)."""
        own = tokens - (self.overhead_tokens if with_overhead else 0.0)
        return max(1, round(own / self.tokens_per_word))

    @classmethod
    def fit(cls, short: tuple[int, int], long: tuple[int, int]) -> "Ruler":
        """The line through two measurements of (words, tokens)."""
        slope = (long[1] - short[1]) / (long[0] - short[0])
        if slope <= 0:  # the server cuts prompts or counts something else: no line to follow
            return cls()
        return cls(slope, short[1] - slope * short[0], measured=True)


def text(seed: str, words: int) -> str:
    """`words` random words; another seed gives another text from the first word on."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def block_text(blocks: tuple[int, ...], words: int, words_per_block: int, shared: str, own: str) -> str:
    """A prompt of named blocks, as traces with block hashes have them: equal names, equal words.

    `shared` seeds what prompts of one replay have in common, `own` what no block names.
    """
    parts = []
    for name in blocks:
        length = min(words_per_block, words)
        if length <= 0:
            break
        parts.append(text(f"{shared}/block/{name}", length))
        words -= length
    if words > 0:
        parts.append(text(own, words))
    return " ".join(parts)
