"""Published serving throughputs, and what a saturated replica is predicted to give: `cumulo plan validate serving`.

At an infinite request rate as many sequences run as their keys and values fit, and their steps also compute the
prompts: B sequences of I tokens in and O out put B·(1 + I/O) tokens into a step. Its time is that of `step_cost`,
as in every simulation of `cumulo plan serve`; B over it is the throughput.
"""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from cumulo.base.strict import package_csv
from cumulo.engine.simulate.run import Arrival
from cumulo.plan.serve.profile import Saturation, ServingProfile, constants, fitted_file, shipped_profiles
from cumulo.plan.serve.replica import TENSORRT_LLM, Replica
from cumulo.plan.serve.step_cost import StepLoad
from cumulo.spec.catalog import shipped
from cumulo.spec.model import ModelSpec

_CATALOGUE = {  # the same sizes
    "llama-3.3-70b": "llama-3.1-70b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
}
_WEIGHTS = {"fp8": "float8", "fp4": "float4", "bf16": "bfloat16", "mxfp4": "mxfp4"}
_PROMPT_STEP = 16_384  # tokens that a GPU computes in a step of prompts alone


@dataclass(frozen=True, slots=True)
class ServedRow:
    """One published throughput."""

    model: str
    device: str
    tp: int
    weights: str
    prompt: int
    answer: int  # 0: of prompts alone, and throughput is of their tokens
    requests: int
    tokens_per_s: float  # output, of all GPUs together
    pp: int = 1
    dp: int = 1  # engines that share the experts, each with attention and requests of its own
    source: str = ""
    running: int = 0  # sequences of an engine that only decodes; 0: it computes prompts, too
    kv: str = ""  # fp8 or bf16; empty: as TensorRT-LLM's tables have it

    @property
    def kind(self) -> str:
        return "dense" if _spec(self.model).moe is None else "mixture"

    @property
    def name(self) -> str:
        sizes = "".join(f" {axis}{getattr(self, axis)}" for axis in ("pp", "dp") if getattr(self, axis) > 1)
        return f"{self.model} {self.device} tp{self.tp}{sizes} {self.weights} {self.prompt}/{self.answer}"

    @property
    def described(self) -> str:
        """For people."""
        ranks = " ".join(
            f"{axis}{getattr(self, axis)}" for axis in ("tp", "pp", "dp") if getattr(self, axis) > 1
        )
        what = ", ".join(filter(None, (self.model, self.device, ranks, self.weights)))
        from_source = f" ({self.source})" if self.source else ""
        return f"{what}: prompts of {self.prompt:,} tokens, answers of {self.answer:,} tokens{from_source}"


@cache
def served_rows() -> tuple[ServedRow, ...]:
    """Our transcription of TensorRT-LLM's perf-overview.md in its versions 0.20, 1.0 and 1.2."""
    return served_rows_of(package_csv("cumulo.plan", "data/published_serving.csv"))


@cache
def wide_rows() -> tuple[ServedRow, ...]:
    """DeepSeek-V3 over many GPUs, prompts and answers apart; nothing is fitted to them."""
    return served_rows_of(package_csv("cumulo.plan", "data/published_wide_serving.csv"))


def served_rows_of(lines: Iterable[Mapping[str, str]]) -> tuple[ServedRow, ...]:
    found = tuple(map(_row, lines))
    for row in found:
        if not (min(row.tp, row.pp, row.dp, row.prompt, row.requests) > 0 <= min(row.answer, row.running)):
            raise ValueError(f"{row} has a number that is not above 0")
        if not 0 < row.tokens_per_s < math.inf:
            raise ValueError(f"{row} has a throughput that is not above 0, or not finite")
    return found


def _row(line: Mapping[str, str]) -> ServedRow:
    """Where a line does not say it, a mixture on several GPUs has data-parallel attention, as TensorRT-LLM's tables
    since 1.0 have it under the name of TP (their commands say so)."""
    tp, dp = int(line["tp"]), line.get("dp")
    model = line["model"]
    if dp is None and tp > 1 and _spec(model).moe is not None:
        tp, dp = 1, str(tp)
    return ServedRow(
        model, line["gpu"], tp, line["weights"], int(line["input"]), int(line["output"]), int(line["requests"]),
        float(line["output_tok_s"]), int(line.get("pp") or 1), int(dp or 1), line.get("source") or "",
        int(line.get("running") or 0), line.get("kv") or "",
    )  # fmt: skip


def _spec(model: str) -> ModelSpec:
    return shipped().model(_CATALOGUE.get(model, model))


@cache
def replica_of(
    model: str, device: str, tp: int, weights: str, longest: int, pp: int = 1, dp: int = 1, kv: str = ""
) -> Replica:
    catalog = shipped()
    node = catalog.cluster(1, device).node
    plain = kv == "bf16" or (not kv and weights == "mxfp4" and node.device.generation == "hopper")
    return Replica(
        _spec(model),
        node,
        catalog.fabric("rail-infiniband"),
        tp,
        weights=_WEIGHTS[weights],
        kv="" if plain else "float8",
        engine=TENSORRT_LLM,
        max_context=longest,
        pp=pp,
        dp=dp,
    )


def _replica(row: ServedRow) -> Replica:
    length = row.prompt + row.answer
    return replica_of(row.model, row.device, row.tp, row.weights, length, row.pp, row.dp, row.kv)


@cache
def _kv_tokens(replica: Replica) -> int:
    return replica.memory().kv_blocks * replica.engine_config().block_size


@dataclass(frozen=True, slots=True)
class ServedPrediction:
    row: "ServedRow | OwnRun"
    error: float  # +0.05: 5% more tokens per second than were published
    range: float  # nine of ten lie within a factor of 1 + range

    @property
    def covered(self) -> bool:
        return abs(math.log1p(self.error)) <= math.log1p(self.range)


def predict_served(row: ServedRow, left_out: str = "") -> ServedPrediction:
    """`left_out`: model, device or source: that of the row has had no say, in constants and range."""
    fold, given = f"{left_out} {getattr(row, left_out)}" if left_out else "", fitted_file()
    fold = fold if fold in given["left_out"] else ""
    found = given["promised"][fold][row.kind] if fold else _replica(row).confidence.error
    return ServedPrediction(
        row, saturated_tokens_per_s(row, constants(fold)) / row.tokens_per_s - 1, float(found)
    )


def saturated_tokens_per_s(row: ServedRow, given: Saturation) -> float:
    """Output tokens per second of a replica that never waits for requests."""
    length = row.prompt + row.answer
    replica = _replica(row)
    if not row.answer:
        return row.dp * prompt_rate(replica, row.prompt, given)
    if row.running:
        return row.dp * decode_rate(replica, row.running, row.prompt + row.answer / 2, given)
    requests = row.requests / row.dp
    reserved = given.reserved * replica.device.memory_bytes / replica.work().kv_bytes_per_token
    fit = (_kv_tokens(replica) - reserved) / length
    running = min(max(fit, 1.0), given.most_running, requests)
    waves = requests / running
    if waves < 4:  # the last of few is not full, and all that start together end together
        waves = max(1, math.ceil(waves - 1e-9))
    running = requests / waves
    return row.dp * saturated_rate(replica, running, row.prompt, row.answer, given)


def saturated_rate(
    replica: Replica, running: float, prompt: float, answer: float, given: Saturation
) -> float:
    """Output tokens per second with so many sequences that run at a time. Where fewer than one begins in a step,
    most steps compute no prompt; engines that share experts wait for one another's."""
    rows = running / replica.pp
    prompts = rows / answer  # of a step
    mixed = 1 - math.exp(-prompts * replica.dp) if prompts < 3 else 1.0
    cost = replica.cost_under(_profile(given))

    def step_s(begun: float) -> float:
        load = StepLoad(
            round(rows + begun * prompt), round(rows), round(rows), round(rows * (prompt + answer / 2)), 0,
            math.ceil(begun * prompt**2 / 2), round(begun * prompt),
        )  # fmt: skip
        return sum(cost.parts(load))

    return running / ((1 - mixed) * step_s(0.0) + mixed * step_s(prompts / mixed))


def prompt_rate(replica: Replica, prompt: int, given: Saturation) -> float:
    """Prompt tokens per second of an engine that computes nothing else."""
    rows = max(1, _PROMPT_STEP // prompt)
    load = StepLoad(rows * prompt, rows, rows, 0, 0, rows * prompt**2 // 2, rows * prompt)
    return rows * prompt / sum(replica.cost_under(_profile(given)).parts(load))


def decode_rate(replica: Replica, rows: int, context: float, given: Saturation) -> float:
    """Output tokens per second of an engine that computes no prompts."""
    load = StepLoad(rows, rows, rows, round(rows * context))
    return rows / sum(replica.cost_under(_profile(given)).parts(load))


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

    @property
    def prediction(self) -> ServedPrediction:
        error = self.predicted_tokens_per_s() / self.tokens_per_s - 1
        return ServedPrediction(self, error, shipped_profiles()["h200"].error)

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
