"""`cumulo bench engine`: Cumulo and its rivals on one model, one machine, the same threads, in turns.

Every round makes every measurement with every side, in an order that alternates, and only one side computes
at a time. A ratio is the median of the rounds' ratios: a noisy neighbour then hits both sides alike.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumulo.base.reference_text import reference_text
from cumulo.base.report import Row
from cumulo.bench.worker import FreshPieces, SideProcess
from cumulo.errors import CumuloError

RIVALS = ("transformers", "llama.cpp")
REST_S = 0.2  # lets the threads of the side before go to sleep


@dataclass(frozen=True, slots=True)
class Contest:
    """One thing every side does, and what Cumulo must and wants to reach relative to each rival."""

    name: str
    sequences: int
    prompt_tokens: int
    new_tokens: int  # 0: a prefill
    must: dict[str, float]
    aim: dict[str, float]


MEASUREMENTS = (
    Contest(
        "decode, 1 sequence", 1, 128, 128,
        must={"llama.cpp": 0.8, "transformers": 3.0}, aim={"llama.cpp": 1.2, "transformers": 5.0},
    ),
    Contest(
        "decode, 16 sequences", 16, 128, 64,
        must={"llama.cpp": 1.5, "transformers": 2.0}, aim={"llama.cpp": 3.0, "transformers": 4.0},
    ),
    Contest(
        "prefill, 512 tokens", 1, 512, 0,
        must={"llama.cpp": 1.5, "transformers": 1.5}, aim={"llama.cpp": 3.0, "transformers": 3.0},
    ),
)  # fmt: skip

Rates = dict[tuple[str, str], list[float]]  # (measurement, side) -> tokens per second, one per round


def parse_rivals(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in RIVALS:
            raise CumuloError(f"--against knows {' and '.join(RIVALS)}, not {name!r}")
    return list(dict.fromkeys(names))


def measure(
    model: str | None,
    rivals: Sequence[str],
    threads: int,
    rounds: int,
    tell: Callable[[str, int, int], None],
) -> list[Row]:
    """Rates of every side, ratios to every rival, load times and peak memory. `tell(what, done, total)`."""
    from cumulo.models.files.hub import resolve

    source = resolve(model)
    if "llama.cpp" in rivals and source.format != "gguf":
        raise CumuloError(
            f"llama.cpp reads GGUF files only, and {source.name} is none: leave it out of --against"
        )
    sides = ["cumulo", *rivals]
    total = len(sides) + (rounds + 1) * len(MEASUREMENTS) * len(sides)
    workers: dict[str, SideProcess] = {}
    rates: Rates = {(m.name, side): [] for m in MEASUREMENTS for side in sides}
    load_s: dict[str, float] = {}
    done = 0
    try:
        for side in sides:
            tell(f"loading {side}", done, total)
            workers[side] = SideProcess(side, model, source.path, threads)
            load_s[side] = workers[side].ask("load")
            done += 1
        tokens = workers["cumulo"].ask("tokenize", text=reference_text()[:400_000])
        prompts = FreshPieces(tokens)
        for round_number in range(rounds + 1):  # round 0 warms up: caches, threads, compiled code
            for measurement in MEASUREMENTS:
                batch = prompts.next_pieces(measurement.sequences, measurement.prompt_tokens)
                for side in _order(sides, round_number):
                    label = "warming up" if round_number == 0 else f"round {round_number} of {rounds}"
                    tell(f"{label}: {measurement.name}, {side}", done, total)
                    time.sleep(REST_S)
                    new_tokens = measurement.new_tokens if round_number else min(8, measurement.new_tokens)
                    rate = _rate(workers[side], batch, new_tokens)
                    if round_number > 0:
                        rates[measurement.name, side].append(rate)
                    done += 1
        peak_bytes = {side: worker.ask("peak_memory_bytes") for side, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    rows = _rows(rates, rivals)
    rows += [Row(f"load: {side}", load_s[side], "s", "lower") for side in sides]
    rows += [Row(f"peak memory: {side}", peak_bytes[side] / 2**20, "MiB", "lower") for side in sides]
    return rows


def _rate(worker: SideProcess, prompts: list[list[int]], new_tokens: int) -> float:
    if new_tokens == 0:
        return float(worker.ask("prefill", prompt=prompts[0]))
    return float(worker.ask("decode", prompts=prompts, new_tokens=new_tokens))


def _order(sides: list[str], round_number: int) -> list[str]:
    """Alternately forwards and backwards, so that nobody always follows the same neighbour."""
    return sides if round_number % 2 == 0 else sides[::-1]


def _rows(rates: Rates, rivals: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    for measurement in MEASUREMENTS:
        ours = rates[measurement.name, "cumulo"]
        for side in ("cumulo", *rivals):
            values = rates[measurement.name, side]
            spread = f"{min(values):.3g} to {max(values):.3g} in {len(values)} rounds"
            rows.append(Row(f"{measurement.name}: {side}", statistics.median(values), "tok/s", note=spread))
        for side in rivals:
            theirs = rates[measurement.name, side]
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            rows.append(
                Row(
                    f"{measurement.name}: cumulo / {side}", ratio, "×",
                    must=measurement.must[side], aim=measurement.aim[side],
                )
            )  # fmt: skip
    return rows
