"""Why there is no plan, and the nearest thing that works: what `cumulo plan train` says when it finds none."""

from collections.abc import Iterator
from dataclasses import replace

from cumulo.base.quantities import quantity
from cumulo.errors import ConfigError, OutOfMemory
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.ledger import MemoryLedger
from cumulo.plan.memory.peak import least_memory_bytes, peak_memory
from cumulo.plan.search.space import Choices, TrainGoal, Variant, job_of, pipelines, shapes, zero_stages
from cumulo.spec.cluster import Cluster

_LEAST = Choices(
    micro_batches=(1,), schedules=("1f1b",), recompute=("full",), sequence_parallel=(True,), zero=(3,),
    zero_with_pipeline=(3,),
)  # fmt: skip
_MOST_DOUBLINGS = 12


def refuse(goal: TrainGoal) -> None:
    """Raise what explains why no plan of the space exists or fits."""
    least = least_memory(goal)
    if least is None:
        raise ConfigError(_nothing_divides(goal))
    limit = goal.memory_limit_bytes
    ledger, what = least
    largest = max(ledger.lines, key=lambda line: line.predicted)
    message = (
        f"no layout fits: the least any needs is {quantity(ledger.total, 'B')} on a GPU ({what}; most of it "
        f"{largest.name}, {quantity(largest.predicted, 'B')}), and there are {quantity(limit, 'B')}"
    )
    if (enough := _enough_gpus(goal)) is not None:
        message += f"; {enough:,} of these GPUs would hold it"
    raise OutOfMemory(message)


def least_memory(goal: TrainGoal) -> tuple[MemoryLedger, str] | None:
    """Of all ways to split, the one that needs least: everything shared, everything recomputed."""
    best: tuple[MemoryLedger, str] | None = None
    # By a bound first, which plays no schedule: few are left to be looked at closely.
    for least_bytes, job in sorted(
        ((least_memory_bytes(job), job) for job in _smallest_jobs(goal)), key=lambda entry: entry[0]
    ):
        if best is not None and least_bytes >= best[0].total:
            break
        ledger = peak_memory(job)
        if best is None or ledger.total < best[0].total:
            best = ledger, str(job.layout)
    return best


def _smallest_jobs(goal: TrainGoal) -> Iterator[TrainJob]:
    for shape in shapes(goal, _LEAST):
        ways = pipelines(shape.pp, shape.micro_batches(goal.global_batch), goal.model.layers, _LEAST)
        for schedule, chunks in ways:
            (zero,) = zero_stages(shape, _LEAST)
            yield job_of(shape, Variant(schedule, chunks, zero, "full"), goal)


def _enough_gpus(goal: TrainGoal) -> int | None:
    """Twice as many until it fits, with as large a batch as that needs."""
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        gpus = goal.cluster.gpus << doubling
        try:
            cluster = Cluster(goal.cluster.node, gpus, goal.cluster.fabric)
        except ConfigError:
            continue
        batch = max(goal.global_batch, gpus)
        found = least_memory(replace(goal, cluster=cluster, global_batch=batch))
        if found is not None and found[0].total <= goal.memory_limit_bytes:
            return gpus
    return None


def _nothing_divides(goal: TrainGoal) -> str:
    gpus, batch = goal.cluster.gpus, goal.global_batch
    asked = f"{gpus:,} GPUs cannot share a batch of {batch:,} sequences of {goal.sequence_length:,} tokens"
    near = range(max(1, batch - 64), batch + 65)
    shared = (gpus // part for part in range(1, 65) if gpus % part == 0)
    powers = (1 << exponent for exponent in range((4 * max(batch, gpus)).bit_length()))
    for other in sorted({*near, *shared, *powers}, key=lambda size: (abs(size - batch), -size)):
        if next(shapes(replace(goal, global_batch=other), _LEAST), None) is not None:
            return f"{asked} in any layout of this model; a batch of {other:,} can be shared"
    return f"{asked} in any layout of this model; take a power of two of both"
