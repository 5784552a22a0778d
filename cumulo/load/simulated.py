"""Traffic and objectives of simulations, in the forms of the load generator. `simulate` and `plan serve` call."""

import itertools
import random
from pathlib import Path

from cumulo.engine.simulate.run import Arrival
from cumulo.errors import ConfigError
from cumulo.load.prompts import parse_lengths
from cumulo.load.schedule import Arrivals, parse_process
from cumulo.load.slo import parse_promise
from cumulo.load.trace import open_trace, read_trace
from cumulo.plan.serve.traffic import Traffic, drawn_traffic, read_traffic
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


def read_any_trace(path: Path) -> Traffic:
    """Our own JSON lines, or one of the public traces that the load generator reads, too."""
    first = _first_line(path)
    if '"arrival_s"' in first:
        return read_traffic(path)
    unit_s = 1e-3 if '"hash_ids"' in first else 1.0  # Mooncake counts milliseconds
    return Traffic(
        tuple(
            Arrival(
                row.time_s,
                row.input_tokens,
                row.output_tokens,
                tuple((name, _MOONCAKE_BLOCK) for name in row.blocks),
            )
            for row in read_trace(path, unit_s)
        )
    )


def _first_line(path: Path) -> str:
    try:
        with open_trace(path) as file:
            return file.readline()
    except (OSError, UnicodeDecodeError):
        return ""  # reading it says why
