"""Published serving throughputs, and what a saturated replica is predicted to give: `cumulo plan validate serving`.

At an infinite request rate as many sequences run as their keys and values fit, and each of their steps also
computes its share of the prompts: B sequences of I tokens in and O out put B·(1 + I/O) tokens into a step. Its time
is that of `step_cost`, as in every simulation of `cumulo plan serve`; B over it is the throughput.
"""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from cumulo.base.strict import package_csv
from cumulo.engine.simulate.run import Arrival
from cumulo.plan.serve.profile import Saturation, ServingProfile
from cumulo.plan.serve.replica import TENSORRT_LLM, Replica
from cumulo.plan.serve.step_cost import StepLoad
from cumulo.spec.catalog import shipped

_CATALOGUE = {  # the same sizes
    "llama-3.3-70b": "llama-3.1-70b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
}
_WEIGHTS = {"fp8": "float8", "fp4": "float4", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class ServedRow:
    """One published throughput."""

    model: str
    device: str
    tp: int
    weights: str
    prompt: int
    answer: int
    requests: int
    tokens_per_s: float  # output, of all GPUs together

    @property
    def name(self) -> str:
        return f"{self.model} {self.device} tp{self.tp} {self.weights} {self.prompt}/{self.answer}"

    @property
    def described(self) -> str:
        """For people."""
        what = f"{self.model}, {self.device}, tp{self.tp}, {self.weights}"
        return f"{what}: prompts of {self.prompt:,} tokens, answers of {self.answer:,} tokens"


@cache
def served_rows() -> tuple[ServedRow, ...]:
    """Our transcription of TensorRT-LLM v1.0, docs/source/performance/perf-overview.md."""
    return served_rows_of(package_csv("cumulo.plan", "data/published_serving.csv"))


def served_rows_of(lines: Iterable[Mapping[str, str]]) -> tuple[ServedRow, ...]:
    found = tuple(
        ServedRow(
            line["model"],
            line["gpu"],
            int(line["tp"]),
            line["weights"],
            int(line["input"]),
            int(line["output"]),
            int(line["requests"]),
            float(line["output_tok_s"]),
        )
        for line in lines
    )
    for row in found:
        if not (min(row.tp, row.prompt, row.answer, row.requests) > 0 < row.tokens_per_s < math.inf):
            raise ValueError(f"{row} has a number that is not above 0, or not finite")
    return found


@cache
def replica_of(model: str, device: str, tp: int, weights: str, longest: int) -> Replica:
    catalog = shipped()
    node = catalog.cluster(1, device).node
    return Replica(
        catalog.model(_CATALOGUE.get(model, model)),
        node,
        catalog.fabric("rail-infiniband"),
        tp,
        weights=_WEIGHTS[weights],
        kv="float8",
        engine=TENSORRT_LLM,
        max_context=longest,
    )


@cache
def _kv_tokens(model: str, device: str, tp: int, weights: str, longest: int) -> int:
    replica = replica_of(model, device, tp, weights, longest)
    return replica.memory().kv_blocks * replica.engine_config().block_size


def saturated_tokens_per_s(row: ServedRow, given: Saturation) -> float:
    """Output tokens per second of a replica that never waits for requests."""
    length = row.prompt + row.answer
    kind = (row.model, row.device, row.tp, row.weights, length)
    replica = replica_of(*kind)
    reserved = given.reserved * replica.device.memory_bytes / replica.work().kv_bytes_per_token
    fit = (_kv_tokens(*kind) - reserved) / length
    running = min(max(fit, 1.0), given.most_running, row.requests)
    waves = row.requests / running
    if waves < 4:  # the last of few is not full, and all that start together end together
        waves = max(1, math.ceil(waves - 1e-9))
    running = row.requests / waves
    return saturated_rate(replica, running, row.prompt, row.answer, given)


def saturated_rate(
    replica: Replica, running: float, prompt: float, answer: float, given: Saturation
) -> float:
    """Output tokens per second with so many sequences that run at a time."""
    prompts = running / answer  # of a step
    load = StepLoad(
        round(running + prompts * prompt),
        round(running),
        round(running),
        round(running * (prompt + answer / 2)),
        0,
        round(prompts * prompt**2 / 2),
        round(prompts * prompt),
    )
    return running / sum(replica.cost_under(_profile(given)).parts(load))


@lru_cache(maxsize=64)
def _profile(given: Saturation) -> ServingProfile:
    return given.profile()


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
        for line in package_csv("cumulo.plan", "data/own_serving.csv")
    )
