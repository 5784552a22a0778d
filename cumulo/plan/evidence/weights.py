"""What a prediction rests on: the published rows near it, how far outside them it is, and its interval.
`train_time.estimate` and `cumulo plan validate` ask.

The interval is what the errors of published rows near the question say (a weighted conformal interval: Tibshirani
et al. 2019): the 90% quantile of their sizes, near rows counting more, widened with the distance to the nearest
and with each doubling of GPUs beyond all rows.
The errors are those under constants that never saw the row's generation of software, as a question's has not been
seen either. `cumulo plan validate --left-out` counts how many rows lie inside where only other generations vouch.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

from cumulo.base.strict import package_csv
from cumulo.plan.evidence.published import PublishedRow, rows
from cumulo.plan.job import TrainJob
from cumulo.plan.time.compute_profile import Profile
from cumulo.plan.time.efficiency import generation_of
from cumulo.spec.cluster import Cluster

LEVEL = 0.9
NEIGHBOURS = 250  # rows that have a say
REACH = 8.0  # distance at which a row's say falls to 1/e
# Of the interval, for each unit of distance to the nearest row, and for each doubling of GPUs beyond all rows.
WIDENING = 0.1
LEAST = 0.04  # half-width: what is printed is rounded, and runs differ from day to day
UNNAMED = "unnamed"
BORROWED = 0.20  # half-width at least where constants or rows are of other devices or number formats

# What a doubling of a quantity counts in the distance between two jobs.
_WEIGHTS = {
    "columns of the hidden state": 0.5,
    "layers": 0.3,
    "tokens per sequence": 0.4,
    "tokens per micro-batch and GPU": 0.2,
    "tensor-parallel ranks": 0.6,
    "pipeline stages": 0.4,
    "context-parallel ranks": 0.6,
    "expert-parallel ranks": 0.6,
    "GPUs": 0.3,
    "micro-batches per step": 0.2,
}
# ... and what it counts that they differ in one of these.
_DIFFERENT = {
    "software": 1.0, "device": 2.0, "dtype": 1.5, "recompute": 0.5, "experts": 4.0, "shares_weights": 0.5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judgement:
    """The interval as factors of the predicted time, and sentences for people."""

    low: float
    high: float
    sentences: tuple[str, ...]


UNJUDGED = Judgement(math.exp(-BORROWED), math.exp(BORROWED), ())


@dataclass(frozen=True, slots=True)
class Features:
    """Where a job lies among others."""

    software: str
    device: str
    dtype: str
    recompute: str
    experts: bool
    shares_weights: bool
    logs: tuple[float, ...]  # base 2, in the order of _WEIGHTS


@dataclass(frozen=True, slots=True)
class Witness:
    """A published row and how far off its prediction was."""

    row: PublishedRow
    features: Features
    log_error: float  # of predicted over published
    unseen: float  # size of the error under constants that never saw its generation of software
    unnamed: float  # ... and the software was not named: inferred without its source's descriptions


def features(job: TrainJob, cluster: Cluster, software: str | None = None) -> Features:
    """`software`: what the job's means, where it does not name a generation ("current")."""
    layout = job.layout
    sizes = (
        job.model.hidden,
        job.model.layers,
        job.sequence_length,
        job.tokens_per_rank,
        layout.tp,
        layout.pp,
        layout.cp,
        layout.ep,
        layout.world,
        job.micro_batches,
    )
    dtype = "16 bits" if job.dtype in ("float16", "bfloat16") else job.dtype
    return Features(
        software or job.software,
        cluster.device.generation,
        dtype,
        job.recompute,
        job.model.moe is not None,
        layout.zero == 3,
        tuple(math.log2(size) for size in sizes),
    )


def distance(one: Features, other: Features) -> float:
    """0 for the same job; about 1 for a model twice as wide and a doubled sequence."""
    total = 0.0
    for weight, mine, theirs in zip(_WEIGHTS.values(), one.logs, other.logs, strict=True):
        total += weight * abs(mine - theirs)
    for name, weight in _DIFFERENT.items():
        total += weight * (getattr(one, name) != getattr(other, name))
    return total


@cache
def witnesses() -> tuple[Witness, ...]:
    """All published rows with the errors that the shipped constants leave (`published_training_errors.csv`, written
    by the fit)."""
    by_name = {row.name: row for row in rows()}
    found = []
    for line in package_csv("cumulo.plan", "data/published_training_errors.csv"):
        row = by_name[line["id"]]
        error = math.log(float(line["predicted_over_published"]))
        unseen = (
            abs(math.log(float(line["predicted_without_it"]))) if line["predicted_without_it"] else abs(error)
        )
        unnamed = abs(math.log(float(line["predicted_unnamed"])))
        found.append(Witness(row, features(row.job, row.cluster), error, unseen, unnamed))
    return tuple(found)


@cache
def witnessed_devices() -> frozenset[str]:
    return frozenset(witness.row.cluster.device.name for witness in witnesses())


def half_width(
    job: TrainJob,
    cluster: Cluster,
    borrowed: bool = False,
    without: Collection[str] = (),
    software: str | None = None,
    unnamed: bool = False,
) -> float:
    """Of the interval, as a logarithm. `without`: generations of software whose rows must not vouch. `unnamed`: the
    software is not known, so that of a row makes no distance."""
    mine = features(job, cluster, UNNAMED if unnamed else software)
    nearer = _DIFFERENT["software"] if unnamed else 0.0
    vouching = [one for one in witnesses() if generation_of(one.row.job.software) not in without]
    near = sorted(
        (distance(mine, witness.features) - nearer, witness.unnamed if unnamed else witness.unseen)
        for witness in vouching
    )[:NEIGHBOURS]
    most_gpus = max(witness.row.job.layout.world for witness in vouching)
    beyond = max(0.0, math.log2(job.layout.world / most_gpus))
    nearest = near[0][0]
    weighted = sorted((error, math.exp(-(away - nearest) / REACH)) for away, error in near)
    total = sum(weight for _, weight in weighted)
    count = total**2 / sum(weight**2 for _, weight in weighted)  # rows, as their weights count
    wanted, seen = min(1.0, LEVEL * (1 + 1 / count)) * total, 0.0
    quantile = weighted[-1][0]
    for error, weight in weighted:
        seen += weight
        if seen >= wanted:
            quantile = error
            break
    width = max(LEAST, quantile) * (1 + WIDENING * (nearest + beyond))
    if borrowed or cluster.device.name not in witnessed_devices():
        width = max(width, BORROWED)
    return width


def judge(job: TrainJob, cluster: Cluster, profile: Profile, borrowed: tuple[str, ...]) -> Judgement:
    width = half_width(job, cluster, bool(borrowed), software=profile.software)
    return Judgement(math.exp(-width), math.exp(width), (*_sentences(job, cluster, profile), *borrowed))


def _sentences(job: TrainJob, cluster: Cluster, profile: Profile) -> tuple[str, ...]:
    mine = features(job, cluster, profile.software)
    near = sorted(witnesses(), key=lambda witness: distance(mine, witness.features))
    kind = attrgetter("software", "device", "dtype")
    same = [witness for witness in near if kind(witness.features) == kind(mine)]
    found = [f"constants: {profile.name} ({profile.note})"]
    named = ", ".join(
        f"{witness.row.name} ({distance(mine, witness.features):.1f} doublings away, predicted "
        f"{math.expm1(witness.log_error):+.0%})"
        for witness in near[:3]
    )
    found.append(f"nearest published rows: {named}")
    if cluster.device.name not in witnessed_devices():
        found.append(f"no published row is of a {cluster.device.name}")
    outside = _outside(mine, [witness.features for witness in same or near])
    found.append(
        f"outside the range of the published rows: {outside}"
        if outside
        else "inside the range of the published rows of its kind"
    )
    return tuple(found)


def _outside(mine: Features, theirs: list[Features]) -> str:
    """Which quantities lie beyond all rows, and by how much."""
    parts = []
    for index, name in enumerate(_WEIGHTS):
        values = [each.logs[index] for each in theirs]
        low, high, value = min(values), max(values), mine.logs[index]
        if value > high + 1e-9:
            parts.append(f"{2**value:,.0f} {name} (rows reach {2**high:,.0f})")
        elif value < low - 1e-9:
            parts.append(f"{2**value:,.0f} {name} (rows begin at {2**low:,.0f})")
    return ", ".join(parts)
