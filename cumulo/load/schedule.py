"""What will be sent and when: a `Schedule` of conversations, planned from a workload and a seed. Pure.

`plan` makes one for a level of load, `trace.plan_trace` from a recorded trace; the player sends it.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from cumulo.base.quantities import parse_count, parse_number
from cumulo.errors import CumuloError
from cumulo.load.prompts import Lengths, constant

Process = Literal["poisson", "constant", "burst"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process. The rate goes from `rate` to `final_rate` within `ramp_s`, then stays there."""

    rate: float  # conversations per second
    process: Process = "poisson"
    burst_size: int = 1
    final_rate: float | None = None
    ramp_s: float = 0.0

    def __post_init__(self) -> None:
        for value in (self.rate, self.rate if self.final_rate is None else self.final_rate):
            if not 0 < value < math.inf:
                raise CumuloError(f"an arrival rate must be more than 0 requests per second, got {value:g}")
        if self.final_rate is not None and not self.ramp_s > 0:
            raise CumuloError("a ramp of the arrival rate needs a duration: add --duration")

    @property
    def label(self) -> str:
        if self.final_rate is None:
            return f"{self.rate:.4g}/s"
        return f"{self.rate:.4g}→{self.final_rate:.4g}/s"

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Endless, never decreasing."""
        for unit_time in _unit_times(self.process, self.burst_size, rng):
            yield self._when_s(unit_time)

    def expected_by(self, time_s: float) -> float:
        """How many arrivals are expected until `time_s`: the integral of the rate."""
        if self.final_rate is None:
            return self.rate * time_s
        ramped_s = min(time_s, self.ramp_s)
        slope = (self.final_rate - self.rate) / self.ramp_s
        return ramped_s * (self.rate + slope * ramped_s / 2) + self.final_rate * (time_s - ramped_s)

    def _when_s(self, arrivals: float) -> float:
        """The inverse of `expected_by`: a process of rate 1 becomes one of this rate by stretching its time."""
        if self.final_rate is None or self.final_rate == self.rate:
            return arrivals / self.rate
        ramped = self.expected_by(self.ramp_s)
        if arrivals >= ramped:
            return self.ramp_s + (arrivals - ramped) / self.final_rate
        slope = (self.final_rate - self.rate) / self.ramp_s
        # The smaller root of rate·t + slope·t²/2 = arrivals, in the form that does not cancel.
        return 2 * arrivals / (self.rate + math.sqrt(self.rate**2 + 2 * slope * arrivals))


def _unit_times(process: Process, burst_size: int, rng: random.Random) -> Iterator[float]:
    """The process at one arrival per second."""
    time = 0.0
    number = 0
    while True:
        match process:
            case "poisson":
                time += rng.expovariate(1.0)
            case "constant":
                time = float(number)
            case "burst":
                time = float(number - number % burst_size)
        yield time
        number += 1


def parse_process(text: str) -> tuple[Process, int]:
    """'poisson', 'constant' or 'burst:8' (eight at once), as a process and its burst size."""
    name, _, size = text.strip().lower().partition(":")
    if name == "poisson" and not size:
        return "poisson", 1
    if name == "constant" and not size:
        return "constant", 1
    if name == "burst" and size:
        return "burst", parse_count(size, "a burst's size")
    raise CumuloError(f"--arrivals must be poisson, constant or burst:SIZE (as in burst:8), got {text!r}")


def parse_rates(text: str, process: Process, burst_size: int, duration_s: float | None) -> list[Arrivals]:
    """'2' is one level, '1,2,4' a sweep of three, '1:8' a ramp over the duration."""
    levels = []
    for part in text.split(","):
        first, is_ramp, last = part.partition(":")
        rate = parse_number(first, "--rate", more_than=True)
        if is_ramp:
            final_rate = parse_number(last, "--rate", more_than=True)
            levels.append(Arrivals(rate, process, burst_size, final_rate, duration_s or 0.0))
        else:
            levels.append(Arrivals(rate, process, burst_size))
    return levels


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One request: its new text and the answer wanted. Earlier turns come along as history."""

    input_tokens: int
    output_tokens: int
    think_s: float = 0.0  # pause after the previous answer
    not_before_s: float | None = None  # a trace's own time for this turn
    blocks: tuple[int, ...] = ()  # names of equal pieces of prompts, where a trace tells


@dataclass(frozen=True, slots=True)
class PlannedConversation:
    """Requests that follow one another. `start_s` None: as soon as a place in the closed loop is free."""

    number: int
    turns: tuple[PlannedTurn, ...]
    seed: str
    start_s: float | None = None
    prefix: str | None = None  # the seed of texts that others share
    prefix_tokens: int = 0
    measured: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """A level of load. With `concurrency` the loop is closed; otherwise each conversation starts on time."""

    conversations: Iterable[PlannedConversation]
    concurrency: int | None = None
    stop_s: float | None = None  # start no conversation after this
    requests: int | None = None  # how many turns it has in all, where that is known


@dataclass(frozen=True, slots=True)
class Workload:
    """The kind of requests, whatever the rate: lengths, shared prefixes, turns."""

    input_tokens: Lengths = field(default_factory=lambda: constant(128))
    output_tokens: Lengths = field(default_factory=lambda: constant(64))
    turns: Lengths = field(default_factory=lambda: constant(1))
    think_s: float = 0.0  # mean of an exponential pause between turns
    prefix_tokens: int = 0
    prefixes: int = 1  # how many different shared prefixes there are

    def conversation(
        self, number: int, seed: str, start_s: float | None, measured: bool
    ) -> PlannedConversation:
        """Number `number` of the seed's endless sequence; the same for every rate and every machine."""
        rng = random.Random(f"{seed}/{number}")
        turns = tuple(
            PlannedTurn(
                self.input_tokens.draw(rng),
                self.output_tokens.draw(rng),
                rng.expovariate(1 / self.think_s) if position and self.think_s else 0.0,
            )
            for position in range(self.turns.draw(rng))
        )
        prefix = f"{seed}/prefix/{rng.randrange(self.prefixes)}" if self.prefix_tokens else None
        return PlannedConversation(
            number, turns, f"{seed}/{number}", start_s, prefix, self.prefix_tokens if prefix else 0, measured
        )


def plan(
    workload: Workload,
    load: Arrivals | int,
    seed: str,
    conversations: int | None = None,
    duration_s: float | None = None,
    warmup: int = 0,
) -> Schedule:
    """The schedule of one level: `load` is a concurrency or an arrival process.

    It ends after so many conversations, after a duration, or whichever comes first. The first `warmup`
    ones come on top, are sent like all others and left out of the figures.
    """
    if conversations is None and duration_s is None:
        raise CumuloError("a run needs an end: say how many requests or for how long")
    total = None if conversations is None else conversations + warmup
    starts_s: Iterator[float | None] = itertools.repeat(None)
    if not isinstance(load, int):
        end_s = math.inf if duration_s is None else duration_s
        times_s = load.times_s(random.Random(f"{seed}/arrivals"))
        before_end_s = itertools.takewhile(lambda time_s: time_s < end_s, times_s)
        starts_s = before_end_s
    drawn = (
        workload.conversation(number, seed, start_s, measured=number >= warmup)
        for number, start_s in enumerate(itertools.islice(starts_s, total))
    )
    if isinstance(load, int) and total is None:
        return Schedule(drawn, load, duration_s)
    planned = tuple(drawn)
    return Schedule(planned, load if isinstance(load, int) else None, duration_s, count_requests(planned))


def count_requests(conversations: Iterable[PlannedConversation]) -> int:
    return sum(len(conversation.turns) for conversation in conversations)
