"""Traffic and objectives of simulations, in the forms of the load generator. `simulate` and `plan serve` call."""

import itertools
import random
from pathlib import Path

from cumulo.engine.simulate.run import Arrival
from cumulo.errors import ConfigError
from cumulo.load.prompts import parse_lengths
from cumulo.load.schedule import Arrivals, parse_process
from cumulo.load.slo import parse_promise
from cumulo.load.trace import TraceRow, read_trace
from cumulo.plan.serve.traffic import Traffic, drawn_traffic
from cumulo.spec.slo import Slo

_MOONCAKE_BLOCK = 512  # tokens that a hash of Mooncake's traces stands for


def parse_objective(text: str, percentile: float) -> Slo | None:
    if not text:
        return None
    if not 0 < percentile < 100:
        raise ConfigError(f"the SLO's percentile must be between 0 and 100, got {percentile:g}; 99 is usual")
    return parse_promise(text, percentile / 100)


def draw_traffic(
    input_tokens: str,
    output_tokens: str,
    prefix_tokens: int,
    prefixes: int,
    arrivals: str,
    requests: int,
    seed: int,
) -> Traffic:
    """One request per second; rates stretch its time."""
    if requests < 2:
        raise ConfigError(
            f"--requests must be 2 or more, because a rate needs two arrivals; got {requests} (1000 is usual)"
        )
    process, burst = parse_process(arrivals)
    times_s = Arrivals(1.0, process, burst).times_s(random.Random(f"{seed}/arrivals"))
    return drawn_traffic(
        requests, parse_lengths(input_tokens, "--input").draw, parse_lengths(output_tokens, "--output").draw,
        times_s=list(itertools.islice(times_s, requests)), prefix_tokens=prefix_tokens, prefixes=prefixes,
        seed=seed,
    )  # fmt: skip


def read_traffic(path: Path) -> Traffic:
    """A trace of our own form, or one of the public ones, as the load generator reads them."""
    rows, names = read_trace(path), dict[str, int]()
    unit_s = 1e-3 if any(row.blocks for row in rows) else 1.0  # Mooncake counts milliseconds

    def shared(row: TraceRow) -> tuple[tuple[int, int], ...]:
        if row.prefix is not None:
            return ((names.setdefault(row.prefix, len(names)), row.prefix_tokens),)
        return tuple((name, _MOONCAKE_BLOCK) for name in row.blocks)

    return Traffic(
        tuple(Arrival(unit_s * row.time_s, row.input_tokens, row.output_tokens, shared(row)) for row in rows)
    )
