"""ClusterGoal: the question that `cumulo plan cluster` answers, and what it assumes until told otherwise."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cumulo.errors import ConfigError
from cumulo.plan.cluster.sheet import Sheet
from cumulo.plan.search.fixed import fixed_job
from cumulo.plan.search.space import TrainGoal, tensor_sizes
from cumulo.spec.cluster import Cluster
from cumulo.spec.model import ModelSpec

_SPREADS = {"failures": {"failures_range": 1.0, "small_jobs": 0.0}, "detect": {"detect_range": 1.0}}


def assumptions(told: Mapping[str, float | None] | None = None) -> Sheet:
    """Numbers that no specification of a cluster contains, and what each rests on; `told` replaces some."""
    sheet = Sheet()
    sheet.fill("assumptions")
    for name, value in (told or {}).items():
        if value is not None:
            source = f"--{name.replace('_', '-')}"
            sheet.figures[name] = replace(sheet.figures[name], value=value, source=source)
            for spread, none in _SPREADS.get(name, {}).items():  # what somebody knows has no range
                sheet.figures[spread] = replace(
                    sheet.figures[spread], value=none, source=f"{source} is given"
                )
    for name, one in sheet.figures.items():
        if not 0 <= one.value < math.inf:
            raise ConfigError(f"{name} must be 0 or more, got {one.value}")
    if sheet["pue"] < 1:
        raise ConfigError(
            f"pue must be 1 or more, because a building uses at least the power of its machines; got {sheet['pue']}"
        )
    for name in ("failures", "storage", "stall"):
        if sheet[name] == 0:
            raise ConfigError(f"{name} must be more than 0: a plan without it has no optimum")
    if sheet["broken_share"] > 1:
        raise ConfigError(f"broken_share must be between 0 and 1, got {sheet['broken_share']}")
    return sheet


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
    fixed: str = ""  # a layout in place of a search, as `cumulo plan train --fixed` reads it
    recovery: Literal["restart", "spare", "replica"] = "restart"  # after a failure
    deadline_days: float | None = None  # the job takes no more GPUs than it needs to end in time
    budget: float | None = None  # USD
    assumptions: Sheet = field(default_factory=assumptions)

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

    def on(self, gpus: int) -> TrainGoal:
        """The same training on a part of the cluster."""
        cluster = Cluster(self.cluster.node, gpus, self.cluster.fabric)
        return TrainGoal(
            self.model,
            cluster,
            self.global_batch,
            self.sequence_length,
            dtype=self.dtype,
            software_named=False,
        )


def fixed_part(goal: ClusterGoal) -> TrainGoal:
    """The training on as many GPUs as the given layout names: the others are spares."""
    text = goal.fixed
    sizes = dict(re.findall(r"\b(dp|tp|pp|cp)\s*=\s*(\d+)", text))
    gpus = math.prod(map(int, sizes.values()))
    if gpus > goal.cluster.gpus:
        raise ConfigError(
            f"the layout {text} needs {gpus:,} GPUs, but the cluster contains {goal.cluster.gpus:,}; make dp "
            f"smaller, or raise --gpus"
        )
    part = goal.on(max(1, gpus))
    fixed_job(text, part)  # refuses what is no layout
    if "dp" not in sizes:
        raise ConfigError(
            f"--fixed {text} does not contain dp; add dp=N, the number of model copies (the other nodes are spares)"
        )
    return part


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
