"""Published serving throughputs, and what a saturated replica is predicted to give: `cumulo plan validate serving`.

At an infinite request rate as many sequences run as their keys and values fit, and each of their steps also
computes its share of the prompts: B sequences of I tokens in and O out put B·(1 + I/O) tokens into a step. Its time
is the roofline of `step_cost` with those tokens; B over it is the throughput. The constants start from Cumulo's own
runs on an H200 and are fitted to other engines' tables (`benchmarks/fit_serving.py`).
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from cumulo.plan.network.collectives import Group, Network, collective_s
from cumulo.plan.serve.step_cost_work import Format, StepWork, step_work
from cumulo.spec.catalog import shipped
from cumulo.spec.device import Device

_RESERVED_BYTES = 4e9  # of a device, beside weights, keys and values
_KV_SHARE = 0.9  # of what is left, for keys and values
_OVERLAP = 3.0  # weights stream while products are computed, as in step_cost
_FOUR_BITS = 0.5625  # bytes of a weight with its share of a scale
_CATALOGUE = {"llama-3.3-70b": "llama-3.1-70b"}  # the same sizes


@dataclass(frozen=True, slots=True)
class Saturation:
    """What a saturated engine reaches."""

    products_8bit: float  # of the peak rate
    products_4bit: float
    weights: float  # of the memory's bandwidth, while weights stream
    kv: float  # ... while keys and values are read
    attention: float  # of the 16-bit peak, for prompts
    passes: float  # between products, over ideal fusion
    layer_s: float  # of one layer in one step, whatever its size
    all_reduce: float  # seconds over those of the network model
    experts: float  # of the peak rate, of grouped products
    most_running: float
    kv_margin: float  # memory that a sequence is given, over what its tokens take


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


@cache
def served_rows() -> tuple[ServedRow, ...]:
    """Our transcription of TensorRT-LLM v1.0, docs/source/performance/perf-overview.md."""
    with (_data() / "published_serving.csv").open(encoding="utf-8", newline="") as file:
        return served_rows_of(csv.DictReader(file))


def served_rows_of(lines: Iterable[Mapping[str, str]]) -> tuple[ServedRow, ...]:
    return tuple(
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


@cache
def constants(left_out: str = "") -> Saturation:
    """Of all rows; or of those that are not of a model or a device: `model llama-3.1-8b`, `device h200`."""
    content: Mapping[str, Any] = yaml.safe_load((_data() / "published_serving.yaml").read_text("utf-8"))
    return Saturation(**(content["left_out"][left_out] if left_out else content["all"]))


def _data() -> Path:
    return Path(str(resources.files("cumulo.plan") / "data"))


@cache
def _placed(model: str, device: str, tp: int) -> tuple[StepWork, Device, Group | None]:
    catalog = shipped()
    spec = catalog.model(_CATALOGUE.get(model, model))
    node = catalog.cluster(1, device).node if tp == 1 else catalog.cluster(tp, device).node
    cluster = catalog.cluster(node.gpus, device)
    work = step_work(spec, Format(weights="float8", compute="float8"), tp, tp if spec.moe and tp > 1 else 1)
    return work, cluster.device, Network(cluster).group(tp, 1) if tp > 1 else None


def saturated_tokens_per_s(row: ServedRow, given: Saturation) -> float:
    """Output tokens per second of a replica that never waits for requests."""
    work, device, group = _placed(row.model, row.device, row.tp)
    four = row.weights == "fp4"
    peak = device.flops("float8") * (2 if four else 1)
    number = _FOUR_BITS if four else 1.0
    bandwidth = device.memory_bytes_per_s
    kv_bytes = work.kv_bytes_per_token / 2  # in 8 bits
    experts = work.expert_parameters * work.experts
    held = (work.dense_parameters + experts) * number + 4 * work.head_parameters
    free = max(1e9, _KV_SHARE * (device.memory_bytes - held - _RESERVED_BYTES))
    length = row.prompt + row.answer
    running = min(free / (kv_bytes * length * given.kv_margin), given.most_running, row.requests)
    waves = row.requests / running
    if waves < 4:  # the last of few is not full, and all that start together end together
        waves = max(1, math.ceil(waves - 1e-9))
    running = row.requests / waves
    tokens = running * (1 + row.prompt / row.answer)
    arithmetic_s = 2 * work.dense_parameters * tokens
    arithmetic_s /= peak * (given.products_4bit if four else given.products_8bit)
    if work.experts:
        met = work.expert_parameters * work.experts_per_token * work.experts / work.experts_of_model
        arithmetic_s += 2 * met * tokens / (peak * given.experts)
    streaming_s = (work.dense_parameters + experts) * number / (bandwidth * given.weights)
    wide = device.flops("bfloat16")
    step_s = (arithmetic_s**_OVERLAP + streaming_s**_OVERLAP) ** (1 / _OVERLAP)
    step_s += running * (row.prompt + row.answer / 2) * kv_bytes / (bandwidth * given.kv)
    pairs = running / row.answer * row.prompt**2 / 2
    step_s += work.attention_flops_per_pair * pairs / (wide * given.attention)
    step_s += tokens * work.elementwise_bytes_per_token * given.passes / bandwidth
    step_s += running * 2 * work.head_parameters / (wide * 0.6) + 2 * work.head_parameters / bandwidth
    step_s += running * 3 * work.logit_bytes / bandwidth + given.layer_s * work.layers
    if group is not None:
        message = tokens * work.message_bytes
        step_s += 2 * work.layers * collective_s("all_reduce", message, group) * given.all_reduce
    return float(running / step_s)
