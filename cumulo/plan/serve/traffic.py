"""Traffic: what a deployment is asked to serve. Simulator and planner read it.

Traffic is a list of arrivals, recorded or drawn from a seed, that can be played faster or slower: `at_rate`
stretches its time, so that two rates differ in nothing but the rate.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cumulo.engine.simulate.run import Arrival
from cumulo.errors import ConfigError

Draw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Traffic:
    arrivals: tuple[Arrival, ...]  # in order of time

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ConfigError("this traffic contains no request; it needs one or more")

    @property
    def rate(self) -> float:
        """Requests per second; n arrivals have n - 1 intervals between them. Infinite where all come at once."""
        span_s = self.arrivals[-1].arrived_s - self.arrivals[0].arrived_s
        return (len(self.arrivals) - 1) / span_s if span_s > 0 else math.inf

    def at_rate(self, rate: float) -> "Traffic":
        check_rate(rate)
        if math.isinf(self.rate):
            raise ConfigError(
                "all requests of this traffic arrive at the same time, so it has no rate to change; omit --rate"
            )
        factor = self.rate / rate
        return Traffic(tuple(replace(one, arrived_s=one.arrived_s * factor) for one in self.arrivals))

    def share(self, replicas: int) -> "Traffic":
        """What one of so many replicas gets when requests are dealt out in turn."""
        return Traffic(self.arrivals[::replicas])

    def means(self) -> tuple[float, float, float]:
        """Mean tokens of a prompt, of an answer, and of what prompts have in common with an earlier one."""
        count, seen, shared = len(self.arrivals), set[tuple[int, int]](), 0
        for one in self.arrivals:
            for piece in one.shared:
                shared += piece[1] if piece in seen else 0
                seen.add(piece)
        prompts = sum(one.prompt_tokens for one in self.arrivals)
        return prompts / count, sum(one.output_tokens for one in self.arrivals) / count, shared / count


def check_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ConfigError(f"the rate must be more than 0 requests/s, got {rate:g}; try 1")


def drawn_traffic(
    count: int,
    prompt_tokens: Draw,
    output_tokens: Draw,
    *,
    times_s: Sequence[float],
    prefix_tokens: int = 0,
    prefixes: int = 1,
    seed: int = 0,
) -> Traffic:
    """`count` requests at the given times; each prompt begins with one of `prefixes` common beginnings of
    `prefix_tokens`, and goes on with `prompt_tokens` of its own."""
    if count < 1:
        raise ConfigError(f"a simulation needs 1 request or more, got {count}")
    if prefix_tokens < 0 or prefixes < 1:
        raise ConfigError(
            f"--prefixes must be 1 or more and --shared-prefix 0 or more, got {prefixes} and {prefix_tokens}"
        )
    rng = random.Random(seed)
    arrivals = []
    for time_s in times_s[:count]:
        shared = ((rng.randrange(prefixes), prefix_tokens),) if prefix_tokens else ()
        length = prefix_tokens + prompt_tokens(rng)
        arrivals.append(Arrival(time_s, length, output_tokens(rng), shared))
    return Traffic(tuple(arrivals))
