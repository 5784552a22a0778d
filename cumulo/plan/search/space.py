"""What the search for a training plan tries: every way to split a job that is worth trying, as data.

A `JobShape` fixes what decides how much a rank computes; the `Variant`s of a shape differ in schedule, ZeRO
stage and recomputation only. The search bounds whole shapes before it looks at their variants.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Literal, NamedTuple

from cumulo.errors import ConfigError
from cumulo.layout.check import tensor_sliced
from cumulo.layout.layout import Layout, divisors
from cumulo.pipeline.decide.catalog import FAMILIES
from cumulo.plan.job import Recompute, TrainJob, TrainSettings
from cumulo.plan.time.compute_profile import shipped
from cumulo.plan.time.efficiency import Software, shipped_efficiency
from cumulo.spec.cluster import Cluster
from cumulo.spec.model import ModelSpec

ZeroStage = Literal[0, 1, 2, 3]
# Activations of a micro-batch from which on sequence parallelism never loses: its two collectives move the bytes of
# the one they replace, and latency, which they have twice, no longer counts.
_LARGE_STREAM = 8 * 2**20


@dataclass(frozen=True, slots=True)
class TrainGoal(TrainSettings):
    """What is to be trained, on what."""

    model: ModelSpec
    cluster: Cluster
    global_batch: int  # sequences of a step
    sequence_length: int
    memory_bytes: int | None = None  # that a rank may use; None: the device's
    software_named: bool = True  # False: "current" is only what stands for it
    date: str | None = None  # year and month in which it runs, or the year; None: any
    # None: as the software does it.
    overlap_tensor: bool | None = None
    expert_exchange: Literal["all-to-all", "once"] | None = None
    whole_experts: bool | None = None
    overlap_expert: bool = False
    flash_attention: bool | None = None

    def __post_init__(self) -> None:
        for name in ("global_batch", "sequence_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')} must be 1 or more, got {getattr(self, name)}")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError(f"the memory of a GPU must be more than 0 bytes, got {self.memory_bytes}")
        if self.date is not None and not re.fullmatch(r"20\d\d(-(0[1-9]|1[0-2]))?", self.date):
            raise ConfigError(f"--date is a year and a month, such as 2026-02, or a year; got {self.date!r}")
        device = self.cluster.device
        if device.generation == "cpu" and (self.offload_optimizer or self.offload_activations):
            asked = "--offload-optimizer" if self.offload_optimizer else "--offload-activations"
            raise ConfigError(
                f"{asked} moves memory from a device to its host, and {device.name} is the host itself; omit it, "
                f"or choose another --device"
            )

    @property
    def memory_limit_bytes(self) -> int:
        return self.cluster.device.memory_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def known_software(self) -> Software | None:
        """Its traits, where it is not one that was measured by itself."""
        profiles = shipped()
        name = self.software
        if name == "current":
            name = profiles.current.get(self.cluster.device.generation, profiles.current["other"])
        return shipped_efficiency().software.get(name)

    def _whole_experts(self, layout: Layout) -> bool:
        traits, moe = self.known_software, self.model.moe
        asked = (
            traits is not None and traits.whole_experts if self.whole_experts is None else self.whole_experts
        )
        able = layout.tp > 1 and layout.sequence_parallel and moe is not None
        return asked and able and moe is not None and moe.experts % (layout.ep * layout.tp) == 0

    def job(self, layout: Layout, micro_batch: int = 1, recompute: Recompute = "none") -> TrainJob:
        """This training, split so."""
        traits = self.known_software
        overlaps = traits is not None and traits.overlaps_tensor and layout.tp > 1
        once = traits is not None and traits.exchanges_once
        flash = traits is None or traits.flash_attention
        return TrainJob(
            layout=layout,
            micro_batch=micro_batch,
            recompute=recompute,
            overlap_tensor=overlaps if self.overlap_tensor is None else self.overlap_tensor,
            expert_exchange=self.expert_exchange or ("once" if once else "all-to-all"),
            whole_experts=self._whole_experts(layout),
            overlap_expert=self.overlap_expert
            or (traits is not None and traits.overlaps_experts and layout.ep > 1),
            flash_attention=flash if self.flash_attention is None else self.flash_attention,
            overlap_data=traits is None or traits.overlaps_data,
            gradient_dtype="float32" if traits is None else traits.sums_gradients_in(self.dtype),
            **{name: getattr(self, name) for name in _SAME},
        )


# Of a job as of its goal.
_SAME = ("model", "global_batch", "sequence_length", *(one.name for one in fields(TrainSettings)))


@dataclass(frozen=True, slots=True)
class Choices:
    """Which values are tried. The defaults leave out what another choice is never worse than: some schedules, and
    ZeRO-2 with a pipeline, where gradients would travel once for each micro-batch."""

    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)  # sequences at once
    least_tokens_of_piece: int = 1024  # a context-parallel rank's share of a sequence
    schedules: tuple[str, ...] = field(
        default_factory=lambda: tuple(n for n, family in FAMILIES.items() if not family.never_best)
    )
    chunks_per_stage: tuple[int, ...] = (2, 3, 4, 6, 8)  # of interleaved-1f1b
    zero: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    zero_with_pipeline: tuple[ZeroStage, ...] = (0, 1, 3)
    # From little to much: each contains what the one before it does, by which the search skips.
    recompute: tuple[Recompute, ...] = ("none", "norm+activation", "norm+activation+attention", "full")
    sequence_parallel: tuple[bool, ...] = (True, False)  # where there is tensor parallelism


class JobShape(NamedTuple):
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch: int
    sequence_parallel: bool

    @property
    def mesh(self) -> tuple[int, int, int, int, int]:
        """What plans are told apart by in a ranking."""
        return self.dp, self.tp, self.pp, self.cp, self.ep

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of one data-parallel rank in a step."""
        return global_batch // (self.dp * self.micro_batch)


class Variant(NamedTuple):
    schedule: str
    chunks_per_stage: int | None
    zero: ZeroStage
    recompute: Recompute


def shapes(goal: TrainGoal, choices: Choices) -> Iterator[JobShape]:
    """All that use every GPU and divide the model and the batch."""
    model, gpus = goal.model, goal.cluster.gpus
    for tp in tensor_sizes(model, goal.cluster):
        for pp in divisors(gpus // tp, model.layers):
            for cp in context_sizes(goal, choices, gpus // (tp * pp)):
                dp = gpus // (tp * pp * cp)
                if gpus % (tp * pp * cp) or goal.global_batch % dp:
                    continue
                for ep in expert_sizes(model, dp * cp):
                    for micro_batch in choices.micro_batches:
                        if goal.global_batch // dp % micro_batch:
                            continue
                        for sequence_parallel in _sequence_parallel(goal, choices, tp, cp, micro_batch):
                            yield JobShape(dp, tp, pp, cp, ep, micro_batch, sequence_parallel)


def _sequence_parallel(
    goal: TrainGoal, choices: Choices, tp: int, cp: int, micro_batch: int
) -> tuple[bool, ...]:
    """Without it only where it cannot be, or may lose."""
    if tp == 1:
        return (False,)
    length = goal.sequence_length // cp
    if length % tp:
        return tuple(choice for choice in choices.sequence_parallel if not choice)
    large = micro_batch * length * goal.model.hidden * 2 >= _LARGE_STREAM
    return (True,) if large and True in choices.sequence_parallel else choices.sequence_parallel


def zero_stages(shape: JobShape, choices: Choices) -> tuple[ZeroStage, ...]:
    if shape.dp * shape.cp == 1:
        return (0,)
    return choices.zero if shape.pp == 1 else choices.zero_with_pipeline


@cache
def pipelines(
    stages: int, micro_batches: int, layers: int, choices: Choices
) -> tuple[tuple[str, int | None], ...]:
    """(schedule, chunks of a stage) pairs that the stages, micro-batches and layers allow."""
    if stages == 1:
        return (("1f1b", None),)
    found: list[tuple[str, int | None]] = []
    for name in choices.schedules:
        family = FAMILIES[name]
        for chunks in choices.chunks_per_stage if family.any_chunks else (family.chunks_per_stage,):
            if family.placement.chunks(stages, chunks) > layers or family.refusal(
                stages, micro_batches, chunks
            ):
                continue
            if family.any_chunks and micro_batches % stages:
                continue  # rounds of unequal size, which leave a bubble of their own
            found.append((name, chunks if family.any_chunks else None))
    return tuple(found)


def job_of(shape: JobShape, variant: Variant, goal: TrainGoal) -> TrainJob:
    schedule, chunks, zero, recompute = variant
    layout = Layout(*shape.mesh, zero, shape.sequence_parallel, schedule=schedule, chunks_per_stage=chunks)
    return goal.job(layout, shape.micro_batch, recompute)


def tensor_sizes(model: ModelSpec, cluster: Cluster) -> list[int]:
    """Divisors of everything that is sliced, inside a scale-up domain: farther away tensor parallelism
    starves."""
    parts = tensor_sliced(model)
    if model.kv_heads == 1:  # multi-query attention: ranks repeat the one key/value head
        parts.pop("key/value heads", None)
    sliced = math.gcd(*parts.values())
    return [size for size in divisors(cluster.gpus, cluster.scale_up_gpus) if sliced % size == 0]


def context_sizes(goal: TrainGoal, choices: Choices, ranks: int) -> list[int]:
    """Sizes whose two pieces of a sequence, one from the front and one from the back, are long enough."""
    length = goal.sequence_length
    return [
        size
        for size in divisors(ranks, max(1, length // choices.least_tokens_of_piece))
        if size == 1 or length % (2 * size) == 0
    ]


def expert_sizes(model: ModelSpec, ranks: int) -> list[int]:
    if model.moe is None:
        return [1]
    return [size for size in divisors(model.moe.experts, ranks) if ranks % size == 0]
