"""Kinds of replica that `cumulo plan serve` looks at: devices, ranks, number formats, roles and engine options."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cumulo.layout.serving import ServingLayout, serving_problems
from cumulo.plan.serve.deployment import Candidate, candidate
from cumulo.plan.serve.replica import TENSORRT_LLM, Replica
from cumulo.plan.serve.runnable import obstacle
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import Catalog
from cumulo.spec.device import Node
from cumulo.spec.model import ModelSpec
from cumulo.spec.slo import Slo

TENSOR_SIZES = (1, 2, 4, 8)
STAGES = (1, 2, 4)
FRONT_DOOR_S = 0.002  # of a request outside the engine: docs/simulate-serving.md
_MOST_RUNNING = 2048  # of other engines


@dataclass(frozen=True, slots=True)
class ReplicaChoices:
    """What the search may vary."""

    devices: tuple[str, ...]
    weights: tuple[str, ...]
    kv: tuple[str, ...] = ("",)  # "": the format of activations
    split: bool | None = None  # prefill and decode apart; None: both ways
    hypothetical: bool = False  # also what `cumulo serve` cannot run, as other engines do
    acceptance: float = 0.0  # share of drafted tokens that would be right; 0: no speculation is considered
    kv_host_gib: float = 0.0  # host memory that prefixes could go to
    max_loras: int = 0  # adapters that every replica must have room for
    max_lora_rank: int = 16


def kinds(
    spec: ModelSpec, traffic: Traffic, slo: Slo, catalog: Catalog, choices: ReplicaChoices
) -> Iterator[Candidate]:
    """Everything that is looked at."""
    longest = max(one.prompt_tokens + one.output_tokens for one in traffic.arrivals)
    for name in choices.devices:
        node, fabric = catalog.cluster(1, name).node, catalog.fabric("rail-infiniband")
        for tp, pp, ep in rank_sizes(spec, node):
            for weights in choices.weights:
                if weights in ("float8", "float4") and weights not in node.device.peak_flops:
                    continue
                plain = Replica(
                    spec, node, fabric, tp, ep, weights, max_context=longest, pp=pp, front_door_s=FRONT_DOOR_S,
                    max_loras=choices.max_loras, max_lora_rank=choices.max_lora_rank,
                )  # fmt: skip
                for replica in _variants(plain, choices):
                    for apart in (False, True) if choices.split is None else (choices.split,):
                        yield _candidate(replica, apart, traffic, slo, choices.hypothetical)


def _variants(plain: Replica, choices: ReplicaChoices) -> Iterator[Replica]:
    """The engine's options; and the same replica under another engine, which has formats of its own."""
    on_cpu = plain.device.generation == "cpu"
    for kv in choices.kv if not on_cpu else ("",):
        if plain.weights != "float4":
            replica = replace(plain, kv=kv)
            yield replica
            if choices.acceptance:
                yield replace(replica, acceptance=choices.acceptance)
            if choices.kv_host_gib:
                yield replace(replica, kv_host_gib=choices.kv_host_gib)
            if choices.acceptance and choices.kv_host_gib:
                yield replace(replica, acceptance=choices.acceptance, kv_host_gib=choices.kv_host_gib)
    if choices.hypothetical and not on_cpu and plain.weights in ("float8", "float4", "bfloat16"):
        yield replace(plain, engine=TENSORRT_LLM, kv="float8", max_running=_MOST_RUNNING)


def _candidate(replica: Replica, apart: bool, traffic: Traffic, slo: Slo, hypothetical: bool) -> Candidate:
    why = "" if hypothetical else obstacle(replica, apart)
    if why:
        return Candidate(replica, apart, 0.0, why, fits=False, runnable=False)
    return candidate(replica, apart, traffic, slo)


def rank_sizes(spec: ModelSpec, node: Node) -> Iterator[tuple[int, int, int]]:
    """tp, pp and ep of one engine that the scale-up links of a node reach. Pipelines are searched on CPUs only:
    where NVLink reaches all ranks, tensor parallelism answers sooner."""
    for pp in STAGES if node.device.generation == "cpu" else (1,):
        for tp in TENSOR_SIZES:
            if any(serving_problems(spec, ServingLayout(tp, pp), node.scale_up_gpus)):
                continue
            yield tp, pp, 1
            if spec.moe is not None and tp > 1 and spec.moe.experts % tp == 0:
                yield tp, pp, tp
