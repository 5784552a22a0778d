"""`cumulo bench engine`: Cumulo and its rivals on one model, one machine, the same threads, in turns.

Every side is a process of its own, and only one computes at a time.
"""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from cumulo.base.reference_text import reference_text
from cumulo.base.report import Row
from cumulo.bench.sides import FreshPieces, SideProcess
from cumulo.bench.turns import Tell, median_ratio, spread, take_turns
from cumulo.errors import CumuloError

REST_S = 0.2
RIVALS = ("transformers", "llama.cpp")


@dataclass(frozen=True, slots=True)
class Contest:
    """One thing every side does, and what Cumulo must and wants to reach relative to each rival."""

    name: str
    sequences: int
    prompt_tokens: int
    new_tokens: int  # 0: a prefill
    must: dict[str, float]
    aim: dict[str, float]


CONTESTS = (
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


def measure(model: str | None, rivals: Sequence[str], threads: int, rounds: int, tell: Tell) -> list[Row]:
    """Rates of every side in tokens per second, ratios to every rival, load times and peak memory."""
    from cumulo.models.files.hub import resolve

    source = resolve(model)
    if "llama.cpp" in rivals and source.format != "gguf":
        raise CumuloError(
            f"llama.cpp reads GGUF files only, and {source.name} is none: leave it out of --against"
        )
    rows: list[Row] = []
    with ExitStack() as stack:
        workers, load_s = dict[str, SideProcess](), dict[str, float]()
        for side in ("cumulo", *rivals):
            tell(f"loading {side}")
            workers[side] = stack.enter_context(SideProcess(side, model, source.path, threads))
            load_s[side] = workers[side].load()
        prompts = FreshPieces(workers["cumulo"].ask("tokenize", reference_text()[:400_000]))
        for contest in CONTESTS:
            pieces = [
                prompts.next_pieces(contest.sequences, contest.prompt_tokens) for _ in range(rounds + 1)
            ]

            sides = {side: partial(_rate, worker, contest, pieces) for side, worker in workers.items()}
            rows += contest_rows(
                contest, take_turns(sides, rounds, tell, what=f"{contest.name}, ", rest_s=REST_S)
            )
        peak_bytes = {side: worker.peak_memory_bytes() for side, worker in workers.items()}
    rows += [Row(f"load: {side}", load_s[side], "s", "lower") for side in workers]
    rows += [Row(f"peak memory: {side}", peak_bytes[side] / 2**20, "MiB", "lower") for side in workers]
    return rows


def _rate(worker: SideProcess, contest: Contest, pieces: list[list[list[int]]], number: int) -> float:
    """Tokens per second in a round."""
    if contest.new_tokens:
        return float(worker.ask("decode", pieces[number], contest.new_tokens))
    return float(worker.ask("prefill", pieces[number][0]))


def contest_rows(contest: Contest, rates: Mapping[str, Sequence[float]]) -> list[Row]:
    ours, *rivals = rates
    return [
        *(
            Row(f"{contest.name}: {side}", statistics.median(values), "tok/s", note=spread(values))
            for side, values in rates.items()
        ),
        *(
            Row(
                f"{contest.name}: {ours} / {side}", median_ratio(rates[ours], rates[side]), "×",
                must=contest.must[side], aim=contest.aim[side],
            )
            for side in rivals
        ),
    ]  # fmt: skip
