"""One given layout, from text such as `tp=8,pp=16,dp=64,zero=1`. `cumulo plan train --fixed` times it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ConfigError
from cumulo.layout.check import tensor_problems
from cumulo.layout.layout import Layout, nearest_divisor
from cumulo.plan.job import OPERATIONS, Recompute, TrainJob
from cumulo.plan.memory.peak import peak_memory
from cumulo.plan.search.space import TrainGoal

_FIELDS = {"chunks": "chunks_per_stage", "sp": "sequence_parallel"}  # where they have another name


def fixed_job(text: str, goal: TrainGoal) -> TrainJob:
    """What is not said is as the job's software does it; dp, left out, is what the GPUs allow."""
    layout: dict[str, object] = {}
    job: dict[str, object] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (side.strip() for side in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"--fixed takes name=value, as in tp=8,pp=16; got {part!r}")
        if name not in _READERS:
            known = f"; it knows: {', '.join(_READERS)}"
            hint = did_you_mean(name, _READERS, quoted=True, otherwise=known)
            raise ConfigError(f"--fixed does not accept {name!r}{hint}")
        target = job if name in ("micro_batch", "recompute") else layout
        target[_FIELDS.get(name, name)] = _READERS[name](name, value)
    tp = layout.get("tp")
    if (
        isinstance(tp, int)
        and tp > 0
        and (problems := list(tensor_problems(goal.model, tp, repeats_heads=True)))
    ):
        raise ConfigError("; ".join(problems))
    goal = _expert_ranks(layout, goal)
    if "dp" not in layout:
        layout["dp"] = _data_parallel(layout, goal)
    split = Layout(**{**_usual(layout, goal, job), **layout})  # type: ignore[arg-type]
    if split.world != goal.cluster.gpus:
        raise ConfigError(
            f"{split} is a layout of {split.world:,} GPUs, but the cluster has {goal.cluster.gpus:,}; "
            f"use --gpus {split.world}, or omit dp"
        )
    return goal.job(split, **job)  # type: ignore[arg-type]


def said_in(text: str) -> frozenset[str]:
    """Names that the text gives a value."""
    return frozenset(part.partition("=")[0].strip() for part in text.split(","))


def _expert_ranks(layout: dict[str, object], goal: TrainGoal) -> TrainGoal:
    """Publishers count tensor-parallel ranks among the expert-parallel ones where each has whole experts (etp=1); a
    `Layout` does not. Without etp: as the software does it."""
    ep, tp = int(str(layout.get("ep", 1))), int(str(layout.get("tp", 1)))
    etp = layout.pop("etp", None)
    if etp is None:
        traits = goal.known_software
        whole = traits is not None and traits.whole_experts and ep % tp == 0
    elif etp in (1, tp):
        whole = etp == 1
    else:
        raise ConfigError(
            f"--fixed etp={etp}: tensor-parallel ranks share every expert (etp={tp}) or none (etp=1)"
        )
    if not whole or tp == 1 or goal.model.moe is None or ep == 1:
        return replace(goal, whole_experts=False)
    if ep % tp:
        raise ConfigError(
            f"--fixed etp=1: ep {ep} counts the tensor-parallel ranks, and must be a multiple of tp {tp}"
        )
    layout["ep"] = ep // tp
    return replace(goal, whole_experts=True)


def _usual(given: Mapping[str, object], goal: TrainGoal, job: Mapping[str, object]) -> dict[str, object]:
    """What the software does unless told otherwise; several chunks of a stage are interleaved."""
    found: dict[str, object] = {}
    dp, tp, pp, cp = (int(str(given.get(axis, 1))) for axis in ("dp", "tp", "pp", "cp"))
    if "chunks_per_stage" in given and pp > 1:
        found["schedule"] = "interleaved-1f1b"
    traits = goal.known_software
    if traits is None:
        return found
    if dp * cp > 1:
        found["zero"] = 2 if traits.zero == 3 and pp > 1 else traits.zero
    tokens = goal.sequence_length // max(1, cp) * int(str(job.get("micro_batch", 1)))
    if traits.sequence_parallel and tp > 1 and tokens % tp == 0:
        found["sequence_parallel"] = True
    return found


def _data_parallel(layout: dict[str, object], goal: TrainGoal) -> int:
    ranks = 1
    for axis in ("tp", "pp", "cp"):
        ranks *= max(1, int(str(layout.get(axis, 1))))
    gpus = goal.cluster.gpus
    if gpus % ranks:
        near = nearest_divisor(gpus, ranks)
        raise ConfigError(f"tp × pp × cp = {ranks} does not divide {gpus:,} GPUs; {near:,} does")
    return gpus // ranks


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--fixed {name} must be a whole number, got {value!r}") from None


def _true_or_false(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"--fixed {name} must be true or false, got {value!r}")
    return value.lower() == "true"


def _recompute(name: str, value: str) -> str:
    """Operations may come in any order."""
    parts = [part.strip() for part in value.lower().split("+")]
    found = "+".join(sorted(parts, key=lambda part: OPERATIONS.index(part) if part in OPERATIONS else -1))
    if found not in get_args(Recompute):
        raise ConfigError(
            f"--fixed {name} must be none, full, selective, or some of {'+'.join(OPERATIONS)}, got {value!r}"
        )
    return found


_SIZES = ("dp", "tp", "pp", "cp", "ep", "etp", "zero", "ulysses", "shard", "chunks", "micro_batch")
_READERS: dict[str, Callable[[str, str], object]] = {
    **dict.fromkeys(_SIZES, _number),
    "schedule": lambda _, value: value,
    "sp": _true_or_false,
    "recompute": _recompute,
}


# Memory that a given layout can save where it does not fit as it stands: what a description leaves unsaid, chosen
# so that it costs least. `cumulo plan train --fixed` and `cumulo plan validate` ask.
#
# Published tables name ranks and batches, and seldom what their recipes recompute, or in which numbers they keep
# moments. A layout that is known to have run was made to fit by such settings, so the planner chooses them, too,
# and says which.
@dataclass(frozen=True, slots=True)
class Fitted:
    """The job as it fits, or as it was where nothing makes it fit."""

    job: TrainJob
    saved_by: tuple[str, ...] = ()  # settings that were chosen, in words
    needed_bytes: int = 0  # by the job as it was given, where something was chosen


def fitted(job: TrainJob, limit_bytes: int, said: Collection[str] = ()) -> Fitted:
    """`said`: settings that are not to be changed, by their names in `--fixed`."""
    needed = peak_memory(job).total
    if needed <= limit_bytes:
        return Fitted(job)
    for other, words in _ladder(job, said):
        if peak_memory(other).total <= limit_bytes:
            return Fitted(other, words, needed)
    return Fitted(job)


def _ladder(job: TrainJob, said: Collection[str]) -> Iterator[tuple[TrainJob, tuple[str, ...]]]:
    """From what costs little time to what costs much; each step keeps the ones before it."""
    words: tuple[str, ...] = ()
    recompute_free = "recompute" not in said and job.recompute == "none"
    if recompute_free:
        for operations in ("norm+activation", "norm+activation+attention"):
            job, words = replace(job, recompute=operations), (f"{operations} recomputed",)
            yield job, words
    if job.moment_dtype == "float32" and job.optimizer == "adamw" and job.lora_rank is None:
        job, words = replace(job, moment_dtype="bfloat16"), (*words, "optimizer moments in bfloat16")
        yield job, words
    if job.dtype == "float8" and not job.narrow_activations:
        job, words = replace(job, narrow_activations=True), (*words, "activations kept in 8 bits")
        yield job, words
    if recompute_free:
        kept = words[1:]
        most = max(map(sum, job.chunk_kinds))
        for layers in range(1, most):
            part = f"{layers} of each chunk's {most} layers recomputed"
            yield replace(job, recompute="full", recompute_layers=layers), (part, *kept)
        job, words = replace(job, recompute="full", narrow_activations=False), ("full recomputation", *kept)
        yield job, words
    if job.gradient_dtype == "float32" and job.dtype != "float32":
        narrow = "float16" if job.dtype == "float16" else "bfloat16"
        job, words = replace(job, gradient_dtype=narrow), (*words, f"gradients in {narrow}")  # type: ignore[arg-type]
        yield job, words
    if not job.offload_activations:
        yield replace(job, offload_activations=True), (*words, "activations in host memory")
