"""Why a plan is the best: what bounds it, what the next loses by, what one change would gain. `cumulo plan train`
prints it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cumulo.base.quantities import quantity
from cumulo.base.strict import package_yaml
from cumulo.errors import ConfigError, OutOfMemory
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.ledger import MemoryLedger
from cumulo.plan.memory.peak import least_memory_bytes, peak_memory
from cumulo.plan.search.search import Plan, search
from cumulo.plan.search.space import Choices, TrainGoal, Variant, job_of, pipelines, shapes, zero_stages
from cumulo.plan.time.step import estimate
from cumulo.spec.cluster import Cluster

HALF_NETWORK = "half the network"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that could be different, and the step it would give."""

    what: str
    step_s: float  # for as many tokens as now
    gain: float  # share of the step that it saves; below 0: it would take longer


def bounds_of(plan: Plan) -> tuple[str, ...]:
    """The parts of the step that are a tenth of it or more, largest first, with what would help."""
    parts = sorted(plan.estimate.breakdown, key=lambda part: -part[1])
    remedies = package_yaml("cumulo.plan", "data/remedies.yaml")
    return tuple(
        f"{name} {seconds / plan.estimate.step_s:.0%}"
        + (f" (improved by {remedies[name]})" if name in remedies else "")
        for name, seconds in parts
        if seconds >= 0.1 * plan.estimate.step_s
    )


def loses_by(best: Plan, other: Plan) -> str:
    """What another plan spends more on."""
    first, second = dict(best.estimate.breakdown), dict(other.estimate.breakdown)
    more = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {*first, *second}}
    lost_s = other.estimate.step_s - best.estimate.step_s
    worst = sorted(more.items(), key=lambda part: (-part[1], part[0]))
    causes = [f"{name} +{_shown(seconds)}" for name, seconds in worst[:2] if seconds > 0.1 * lost_s > 0]
    return f"{lost_s / best.estimate.step_s:.1%} slower" + (f": {', '.join(causes)}" if causes else "")


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def changes(plan: Plan, goal: TrainGoal, searched: bool = True) -> tuple[Change, ...]:
    """One thing different at a time, best first. Of a plan that was given and not searched for, also one thing of
    its layout: nothing else of it changes."""
    step_s = plan.estimate.step_s
    # Changes are timed under the job's own software; where none was named, the plan's time is a mean over several.
    own_s = step_s if searched else _step_s(plan.job, goal.cluster)
    different = _searched(plan, goal) if searched else _given(plan, goal, own_s)
    found = [
        Change(what, other_s * step_s / own_s, 1 - other_s / own_s)
        for what, other_s in (*_around(plan, goal), *different)
    ]
    return tuple(sorted(found, key=lambda change: change.step_s))


def _around(plan: Plan, goal: TrainGoal) -> Iterator[tuple[str, float]]:
    """Another cluster, or another batch."""
    job, cluster = plan.job, goal.cluster
    node, device = cluster.node, cluster.device
    faster_links = replace(device, link_bytes_per_s=2 * device.link_bytes_per_s)
    for what, share in (("twice the network", 2.0), (HALF_NETWORK, 0.5)):
        other = replace(node, nic_bytes_per_s=share * node.nic_bytes_per_s)
        yield what, _step_s(job, replace(cluster, node=other))
    yield "twice the scale-up links", _step_s(job, replace(cluster, node=replace(node, device=faster_links)))
    if twice := _try(job, global_batch=2 * job.global_batch):
        yield "twice the batch, for the same number of tokens", _step_s(twice, cluster) / 2


def _searched(plan: Plan, goal: TrainGoal) -> Iterator[tuple[str, float]]:
    """The best plan of a space: all that could be better needs more memory, or is not in the space."""
    job, limit = plan.job, goal.memory_limit_bytes
    # For a quick second look: sequence parallelism as the plan has it.
    choices = Choices(sequence_parallel=(job.layout.sequence_parallel,) if job.layout.tp > 1 else (True,))
    step_s = plan.estimate.step_s
    roomier = search(replace(goal, memory_bytes=2 * limit), choices, 1, faster_than_s=step_s).plans
    yield "twice the memory", roomier[0].estimate.step_s if roomier else step_s
    for what, other in _schedules(job):
        if peak_memory(other).total <= limit:
            yield what, _step_s(other, goal.cluster)


def _given(plan: Plan, goal: TrainGoal, own_s: float) -> Iterator[tuple[str, float]]:
    """A given layout with one thing changed, as far as memory allows; and the best of those that need twice it."""
    limit = goal.memory_limit_bytes
    roomier: list[tuple[float, str]] = []
    for what, other in _neighbours(plan.job, goal):
        needed = peak_memory(other).total
        if needed <= 2 * limit:
            step_s = _step_s(other, goal.cluster)
            if needed <= limit:
                yield what, step_s
            else:
                roomier.append((step_s, what))
    if roomier and (best := min(roomier))[0] < own_s:
        yield f"twice the memory, and {best[1]}", best[0]


def _neighbours(job: TrainJob, goal: TrainGoal) -> Iterator[tuple[str, TrainJob]]:
    layout, choices = job.layout, Choices()
    yield from _schedules(job)
    stages = choices.zero if layout.pp == 1 else choices.zero_with_pipeline
    different: list[tuple[str, dict[str, object]]] = [
        (f"zero {zero}", {"zero": zero}) for zero in stages if zero != layout.zero and layout.data_ranks > 1
    ]
    different += [
        (f"{more} {2 * getattr(layout, more)}, {less} {getattr(layout, less) // 2}",
         {more: 2 * getattr(layout, more), less: getattr(layout, less) // 2})
        for more, less in itertools.permutations(("dp", "tp", "pp", "cp"), 2)
        if getattr(layout, less) % 2 == 0
        and (more != "tp" or 2 * layout.tp <= goal.cluster.scale_up_gpus)
    ]  # fmt: skip
    if job.model.moe is not None:
        different += [(f"ep {size}", {"ep": size}) for size in (layout.ep // 2, 2 * layout.ep) if size]
    if layout.tp > 1:
        other = not layout.sequence_parallel
        words = "with sequence parallelism" if other else "without sequence parallelism"
        different.append((words, {"sequence_parallel": other}))
    for what, fields in different:
        if (found := _with_layout(job, **fields)) is not None:
            yield what, found
    for recompute in choices.recompute:
        if recompute != job.recompute and (found := _try(job, recompute=recompute, recompute_layers=None)):
            yield f"recompute {recompute}", found
    for size in (job.micro_batch // 2, 2 * job.micro_batch):
        if size and (found := _try(job, micro_batch=size)):
            yield f"micro-batch {size}", found


def _schedules(job: TrainJob) -> Iterator[tuple[str, TrainJob]]:
    for schedule in Choices().schedules if job.layout.pp > 1 else ():
        if schedule != job.layout.schedule and (
            found := _with_layout(job, schedule=schedule, chunks_per_stage=None)
        ):
            yield f"schedule {schedule}", found


def _with_layout(job: TrainJob, **fields: object) -> TrainJob | None:
    if fields.get("tp") == 1:
        fields["sequence_parallel"] = False
    try:
        return replace(job, layout=replace(job.layout, **fields))  # type: ignore[arg-type]
    except ConfigError:
        return None


def _try(job: TrainJob, **different: object) -> TrainJob | None:
    try:
        return replace(job, **different)  # type: ignore[arg-type]
    except ConfigError:
        return None


def _step_s(job: TrainJob, cluster: Cluster) -> float:
    return estimate(job, cluster, explain=False).step_s


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
    if would_fit := [*_savings_that_fit(goal), *_gpus_that_fit(goal)]:
        message += f". What would fit, the least change first: {', or '.join(would_fit)}"
    raise OutOfMemory(message)


# Options of `cumulo plan train` and what they change of a goal: first what computes the same, then what trains
# something else.
_SAVINGS: tuple[tuple[str, dict[str, object]], ...] = (
    ("--offload-activations", {"offload_activations": True}),
    ("--optimizer adamw8bit", {"optimizer": "adamw8bit"}),
    ("--offload-optimizer", {"offload_optimizer": True}),
    ("--offload-optimizer --offload-activations", {"offload_optimizer": True, "offload_activations": True}),
    ("--lora-rank 16, which trains adapters only", {"lora_rank": 16}),
    ("--lora-rank 16 --frozen-bits 4, adapters on 4-bit weights", {"lora_rank": 16, "frozen_bits": 4}),
)


def _savings_that_fit(goal: TrainGoal) -> Iterator[str]:
    """On the same GPUs, each with the memory that its smallest layout needs."""
    named: list[dict[str, object]] = []
    for words, fields in _SAVINGS:
        if any(one.items() <= fields.items() for one in named):
            continue
        try:
            other = replace(goal, **fields)  # type: ignore[arg-type]
        except ConfigError:  # a CPU has no host beside it
            continue
        least = least_memory(other) if other != goal else None
        if least is not None and least[0].total <= goal.memory_limit_bytes:
            named.append(fields)
            yield f"{words} ({quantity(least[0].total, 'B')})"


def _gpus_that_fit(goal: TrainGoal) -> Iterator[str]:
    if (enough := _enough_gpus(goal)) is not None:
        yield f"{enough:,} of these GPUs"


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
