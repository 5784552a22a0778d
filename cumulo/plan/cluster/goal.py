"""ClusterGoal: the question that `cumulo plan cluster` answers, and what it assumes until told otherwise."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from cumulo.errors import ConfigError
from cumulo.plan.job import TrainJob
from cumulo.plan.search import fixed
from cumulo.plan.search.space import TrainGoal, tensor_sizes
from cumulo.spec.cluster import Cluster
from cumulo.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Assumption:
    value: float
    unit: str
    label: str
    source: str


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Numbers that no specification of a cluster holds. Each says what it rests on; all can be overridden."""

    failures: Assumption = Assumption(
        3.79,
        "per 1,000 node-days",
        "failures that stop the job, of nodes with 8 GPUs",
        "419 in 54 days of 2,048 nodes: Grattafiori et al. 2024 (Llama 3), Table 5. Meta's research clusters had "
        "6.5 and 2.34 (Kokolis et al. 2024)",
    )
    broken_share: Assumption = Assumption(
        0.69,
        "share",
        "failures after which a node must be repaired",
        "GPU and host parts, 289 of 419: ibid., Table 5",
    )
    repair: Assumption = Assumption(72.0, "h", "time a broken node is away", "assumed")
    detect: Assumption = Assumption(
        120.0, "s", "from a failure until the job is placed on nodes that work", "assumed"
    )
    initialise: Assumption = Assumption(
        265.0,
        "s per 96,000 GPUs",
        "setting up communication",
        "NCCL at 96,000 GPUs: arXiv 2510.20171; taken as linear",
    )
    storage: Assumption = Assumption(
        2000.0,
        "GB/s",
        "storage, reading or writing",
        "sustained rate of the Llama 3 cluster: ibid., section 3.3.1",
    )
    stall: Assumption = Assumption(
        0.01, "share", "share of time that checkpoints may stop training", "assumed"
    )
    switch_w: Assumption = Assumption(
        26.9, "W", "power of a switch, for each port", "1,720 W for 64 ports (NVIDIA QM9700)"
    )
    pue: Assumption = Assumption(1.2, "times", "power of the building over that of its machines", "assumed")
    swap: Assumption = Assumption(
        60.0,
        "s",
        "from a failure until a hot spare has taken over",
        "assumed: detection, and groups of one node anew",
    )
    regroup: Assumption = Assumption(
        10.0,
        "s",
        "from a failure until the other replicas train on",
        "assumed: a timeout of their all-reduce",
    )
    server_rate: Assumption = Assumption(
        40.0, "GB/s", "what a storage server reads or writes", "assumed: two 200 Gbit/s cards at 80%"
    )
    flush: Assumption = Assumption(
        600.0, "s", "between checkpoints that go to storage, where others stay in memory", "assumed"
    )
    kept_checkpoints: Assumption = Assumption(20.0, "checkpoints", "checkpoints that are kept", "assumed")
    storm: Assumption = Assumption(10.0, "s", "time in which all ranks may create their files", "assumed")
    image: Assumption = Assumption(20.0, "GB", "software of a node: container and libraries", "assumed")
    series: Assumption = Assumption(100.0, "series", "metrics of a GPU with its share of the node", "assumed")
    scrape: Assumption = Assumption(15.0, "s", "between two samples of a metric", "assumed")
    node_logs: Assumption = Assumption(1.0, "GB", "logs of a node in a day", "assumed")
    rack: Assumption = Assumption(40.0, "kW", "power of a rack", "assumed: four air-cooled 8-GPU nodes")
    water: Assumption = Assumption(
        1.8, "L/kWh", "water that evaporative cooling takes", "average of US data centres: LBNL 2016 report"
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            if not 0 <= getattr(self, one.name).value < math.inf:
                raise ConfigError(f"{one.name} must be 0 or more, got {getattr(self, one.name).value}")
        if self.pue.value < 1:
            raise ConfigError(
                "pue must be 1 or more, because a building uses at least the power of its machines; got "
                f"{self.pue.value}"
            )
        for name in ("failures", "storage", "stall", "server_rate", "scrape", "rack", "storm"):
            if getattr(self, name).value == 0:
                raise ConfigError(f"{name} must be more than 0: a plan without it has no optimum")
        if self.broken_share.value > 1:
            raise ConfigError(f"broken_share must be between 0 and 1, got {self.broken_share.value}")

    def overridden(self, told: Mapping[str, float | None]) -> "Assumptions":
        """With the values that are told; their source is the option of that name."""
        changes = {
            name: replace(getattr(self, name), value=value, source=f"--{name.replace('_', '-')}")
            for name, value in told.items()
            if value is not None
        }
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class ClusterGoal:
    """A model to pre-train, and all the GPUs there are, spares included."""

    model_name: str
    model: ModelSpec
    cluster: Cluster
    global_batch: int  # sequences of a step
    sequence_length: int
    tokens: float  # to be trained on
    dtype: Literal["bfloat16", "float16", "float32", "float8"] = "bfloat16"
    fixed: TrainJob | None = None  # in place of a search
    recovery: Literal["restart", "spare", "replica"] = "restart"  # after a failure: plan/cluster/recovery.py
    deadline_days: float | None = None  # the job takes no more GPUs than it needs to end in time
    budget: float | None = None  # USD
    assumptions: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        if not 0 < self.tokens < math.inf:
            raise ConfigError(
                f"--tokens must be more than 0 and finite, for example 15e12; got {self.tokens:g}"
            )
        for name in ("deadline_days", "budget"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be more than 0 and finite, got {limit:g}")
        if not self.cluster.device.price_per_hour < math.inf:
            raise ConfigError("the price of a GPU must be a number of dollars, got inf")
        if self.fixed is not None and self.fixed.layout.world > self.cluster.gpus:
            raise ConfigError(
                f"the layout {self.fixed.layout} needs {self.fixed.layout.world:,} GPUs, but the cluster has "
                f"{self.cluster.gpus:,}; make dp smaller, or ask for more GPUs"
            )

    def on(self, gpus: int) -> TrainGoal:
        """The same training on a part of the cluster."""
        cluster = Cluster(self.cluster.node, gpus, self.cluster.fabric)
        return TrainGoal(self.model, cluster, self.global_batch, self.sequence_length, dtype=self.dtype)


def fixed_job(text: str, goal: ClusterGoal) -> TrainJob:
    """As `cumulo plan train --fixed` reads it, but of as many GPUs as it names: the others are spares. What is
    not said is what jobs of this size use: ZeRO-1, and sequence parallelism beside tensor parallelism."""
    sizes = dict(re.findall(r"\b(dp|tp|pp|cp)\s*=\s*(\d+)", text))
    gpus = math.prod(map(int, sizes.values()))
    if gpus > goal.cluster.gpus:
        raise ConfigError(
            f"the layout {text} needs {gpus:,} GPUs, but the cluster contains {goal.cluster.gpus:,}; make dp "
            f"smaller, or raise --gpus"
        )
    usual = "zero=1,sp=true" if int(sizes.get("tp", 1)) > 1 else "zero=1"
    job = fixed.fixed_job(f"{usual},{text}", goal.on(max(1, gpus)))
    if "dp" not in sizes:
        raise ConfigError(
            f"--fixed {text} does not contain dp; add dp=N, the number of model copies (the other nodes are spares)"
        )
    return job


def job_sizes(goal: ClusterGoal, most_gpus: int, states_bytes: float, count: int) -> list[int]:
    """The `count` most promising numbers of GPUs up to `most_gpus` that a job of this batch can use evenly.

    By how many GPUs compute at a time, N × m ÷ (m + (p − 1)/2) × layers ÷ (p × layers of the fullest stage), of
    layouts whose states take at most 0.7 of the memory; half of 1F1B's bubble, as zero-bubble schedules have."""
    best: dict[int, float] = {}
    layers = goal.model.layers
    for gpus, stages, micro_batches, share in _sizes(goal, most_gpus):
        if states_bytes * share <= 0.7 * goal.cluster.device.memory_bytes:
            even = layers / (stages * math.ceil(layers / stages))
            busy = gpus * even * micro_batches / (micro_batches + (stages - 1) / 2)
            best[gpus] = max(busy, best.get(gpus, 0.0))
    return sorted(best, key=lambda gpus: best[gpus], reverse=True)[:count]


def _sizes(goal: ClusterGoal, most_gpus: int) -> Iterator[tuple[int, int, int, float]]:
    """(GPUs, stages, micro-batches, share of the states that a GPU holds) of all layouts of tp, pp and dp."""
    node, batch = goal.cluster.node, goal.global_batch
    replicas = [size for size in range(1, batch + 1) if batch % size == 0]
    for tp in tensor_sizes(goal.model, goal.on(most_gpus // node.gpus * node.gpus).cluster):
        for pp in range(1, goal.model.layers + 1):
            for dp in replicas:
                gpus = tp * pp * dp
                if gpus <= most_gpus and (gpus % node.gpus == 0 or gpus < node.gpus):
                    # ZeRO-1: weights and gradients on every replica, the optimizer's share of each. Of a model with
                    # experts nearly all is in them, and they are spread over replicas as well.
                    spread = tp * pp * (math.gcd(goal.model.moe.experts, dp) if goal.model.moe else 1)
                    yield gpus, pp, batch // dp, (6 + 12 / dp) / 18 / spread
