"""When requests arrive in an open loop: Poisson, constant or in bursts, at a steady or a rising rate. Pure.

Called by `schedule.plan`. The server's speed has no say in these times: that is what makes the loop open.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cumulo.errors import CumuloError
from cumulo.load.units import parse_count, parse_number

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
