"""Kinds of replica that `cumulo plan serve` looks at: devices, ranks, number formats, roles and engine options."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from cumulo.errors import OutOfMemory
from cumulo.layout.serving import ServingLayout, serving_problems
from cumulo.plan.serve.deployment import Candidate, candidate
from cumulo.plan.serve.replica import CUMULO, DISK_BYTES_PER_S, TENSORRT_LLM, Replica
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import Catalog
from cumulo.spec.check import unplayable
from cumulo.spec.device import Node
from cumulo.spec.gpu_kernels import adapter_obstacle_of, obstacle_of
from cumulo.spec.model import ModelSpec
from cumulo.spec.slo import Slo


def obstacle(replica: Replica, split: bool = False) -> str:
    """In words; empty: `cumulo serve` runs it."""
    device, spec = replica.device, replica.spec
    if replica.engine != CUMULO:
        return f"{replica.engine} is not Cumulo's engine"
    if replica.dp > 1:
        return "engines of `cumulo serve` share no experts"
    if unplayable(spec):
        return unplayable(spec)
    if split and replica.pp > 1:
        return "prefill and decode apart need engines without a pipeline"
    if replica.acceptance and replica.ranks > 1:
        return "speculation runs on one rank"
    if replica.kv_disk and replica.ranks > 1:
        return "prefixes are kept on disk by engines on one rank"
    if device.generation == "cpu":
        return ""
    if replica.max_loras and replica.ranks > 1:
        return "adapters are served on one GPU"
    if device.generation.startswith("cdna"):
        return f"the kernels are for NVIDIA's GPUs, and {device.name} is not one"
    if replica.ranks > 1 and not device.link_kind.startswith("nvlink"):
        return f"ranks on GPUs need NVLink, and {device.name} has {device.link_kind}"
    if replica.ranks > replica.node.gpus:
        return f"ranks on GPUs are of one host, and {replica.node.name} has {replica.node.gpus} GPUs"
    if spec.vocab_size % replica.tp:
        return f"tp {replica.tp} does not divide the vocabulary of {spec.vocab_size:,} tokens"
    quantised = replica.weights in ("float8", "int4") or replica.kv == "float8"
    if quantised and replica.max_loras and adapter_obstacle_of(spec) is not None:
        return "adapters of mixtures and of latent attention are not added to quantised formats on a GPU"
    if quantised and (why := obstacle_of(spec, "bfloat16")):
        return f"quantised formats need the GPU's kernels: {why}"
    return ""


TENSOR_SIZES = (1, 2, 4, 8)
SHARING = (2, 4, 8, 16, 32, 64)  # engines that share their experts
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
    speculate: str = "ngram"  # what would draft, or the folder of a head
    kv_host_gib: float = 0.0  # host memory that prefixes could go to
    max_loras: int = 0  # adapters that every replica must have room for
    max_lora_rank: int = 16
    kv_disk: str = ""  # folder that prefixes could go to from there
    kv_disk_gib: float = 0.0  # of all engines of a host
    disk_bytes_per_s: float = DISK_BYTES_PER_S

    @property
    def stores(self) -> dict[str, dict[str, Any]]:
        """Where KV blocks could go from the device: fields of Replica, by the option that asks for them."""
        asked: dict[str, dict[str, Any]] = {}
        if self.kv_host_gib:
            asked[f"--kv-host-gib {self.kv_host_gib:g}"] = {"kv_host_gib": self.kv_host_gib}
        if self.kv_disk:
            asked[f"--kv-disk {self.kv_disk}:{self.kv_disk_gib:g}"] = {
                "kv_disk": self.kv_disk, "kv_disk_gib": self.kv_disk_gib, "disk_bytes_per_s": self.disk_bytes_per_s,
            }  # fmt: skip
        return asked


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
                        yield _candidate(replica, apart, traffic, slo, choices)


def _variants(plain: Replica, choices: ReplicaChoices) -> Iterator[Replica]:
    """The engine's options; and the same replica under another engine, which has formats of its own."""
    on_cpu = plain.device.generation == "cpu"
    for kv in choices.kv if not on_cpu else ("",):
        if plain.weights not in ("float4", "mxfp4"):
            replica = replace(plain, kv=kv)
            yield replica
            if choices.acceptance:
                yield replace(replica, acceptance=choices.acceptance, speculate=choices.speculate)
    if choices.hypothetical and not on_cpu and plain.weights in ("float8", "float4", "mxfp4", "bfloat16"):
        # As published: GPT-OSS has its KV cache in 16 bits on Hopper.
        kv = "" if plain.weights == "mxfp4" and plain.device.generation == "hopper" else "float8"
        other = replace(plain, engine=TENSORRT_LLM, kv=kv, max_running=_MOST_RUNNING)
        yield other
        moe = plain.spec.moe
        if moe is not None and plain.ranks == 1:
            yield from (replace(other, dp=size) for size in SHARING if size <= moe.experts)


def _candidate(
    replica: Replica, apart: bool, traffic: Traffic, slo: Slo, choices: ReplicaChoices
) -> Candidate:
    why = "" if choices.hypothetical else obstacle(replica, apart)
    if why:
        return Candidate(replica, apart, 0.0, why, fits=False, runnable=False)
    found = candidate(replica, apart, traffic, slo)
    if not found.fits:
        return found
    return replace(found, options=tuple(_with_stores(replica, apart, choices)))


def _with_stores(replica: Replica, apart: bool, choices: ReplicaChoices) -> Iterator[Replica]:
    """The replica with what it may keep of KV blocks beyond the device. No bound on its price changes: that counts
    every token once, and a shared prefix not at all."""
    asked = list(choices.stores.values())
    for count in range(1, len(asked) + 1):
        for together in combinations(asked, count):
            more = replace(replica, **{name: value for one in together for name, value in one.items()})
            if not why_no_store(more, apart) and _fits(more):
                yield more


def why_no_store(replica: Replica, apart: bool) -> str:
    """Why a replica cannot keep KV blocks beyond the device as it says; empty: it can."""
    if replica.engine == TENSORRT_LLM:
        return "TensorRT-LLM's published throughputs say nothing about it"
    if apart and replica.kv_disk:
        return "it is considered only where replicas do prefill and decode"
    return obstacle(replica, apart)


def _fits(replica: Replica) -> bool:
    try:
        replica.memory()
    except OutOfMemory:
        return False
    return True


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
