"""Cumulo's own runs on one H200, and what a simulated replica does with the same requests: for
`cumulo plan validate serving`. Measured by `benchmarks/gpu.py` on 2026-11-15 and 16; all requests come at once."""

import csv
import random
from dataclasses import dataclass
from functools import cache
from importlib import resources

from cumulo.engine.simulate.run import Arrival
from cumulo.plan.serve.replica import Replica
from cumulo.spec.catalog import shipped

_SEED = 0  # of the lengths, as in benchmarks/workloads.json


@dataclass(frozen=True, slots=True)
class OwnRun:
    model: str
    weights: str
    requests: int
    prompts: tuple[int, int]  # shortest and longest
    answers: tuple[int, int]
    tokens_per_s: float  # output
    fitted: bool  # constants were fitted to it; the others are held out

    @property
    def name(self) -> str:
        prompt, answer = (
            str(low) if low == high else f"{low}-{high}" for low, high in (self.prompts, self.answers)
        )
        return f"{self.model} {self.weights} {self.requests} × {prompt}/{answer}"

    def predicted_tokens_per_s(self) -> float:
        lengths = random.Random(_SEED)
        arrivals = tuple(
            Arrival(0.0, lengths.randint(*self.prompts), lengths.randint(*self.answers))
            for _ in range(self.requests)
        )
        cluster = shipped().cluster(1, "h200")
        replica = Replica(shipped().model(self.model), cluster.node, cluster.fabric, weights=self.weights)
        run, _ = replica.with_context_for(arrivals).serve(arrivals)
        return sum(one.output_tokens for one in arrivals) / run.ended_s


@cache
def own_runs() -> tuple[OwnRun, ...]:
    text = (resources.files("cumulo.plan") / "data" / "own_serving.csv").read_text("utf-8")
    return tuple(
        OwnRun(
            line["model"],
            line["weights"],
            int(line["requests"]),
            (int(line["shortest_prompt"]), int(line["longest_prompt"])),
            (int(line["shortest_answer"]), int(line["longest_answer"])),
            float(line["output_tok_s"]),
            line["fitted"] == "1",
        )
        for line in csv.DictReader(text.splitlines())
    )
