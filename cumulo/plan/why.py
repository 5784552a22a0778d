"""Why a plan is the best: what bounds it, what the next loses by, what one change would gain. `cumulo plan train`
prints it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cumulo.errors import ConfigError
from cumulo.pipeline.catalog import FAMILIES
from cumulo.plan.job import TrainJob
from cumulo.plan.memory import peak_memory
from cumulo.plan.search import Plan, search
from cumulo.plan.search_space import Choices, TrainGoal
from cumulo.plan.train_time import estimate

# What one would do about each part of a step.
_REMEDIES = {
    "matrix products": "a faster device, or fewer bits",
    "attention": "a faster device, or shorter sequences",
    "memory-bound": "more memory bandwidth",
    "launches": "larger micro-batches",
    "tensor parallel": "less tensor parallelism, or faster scale-up links",
    "context parallel": "less context parallelism",
    "expert parallel": "fewer ranks to spread experts over, or faster links",
    "pipeline bubble": "more micro-batches, fewer stages, or another schedule",
    "data parallel": "a faster network, or a larger batch",
    "optimizer": "sharing the optimizer's states with ZeRO",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that could be different, and the step it would give."""

    what: str
    step_s: float  # for as many tokens as now
    gain: float  # share of the step that it saves; below 0: it would take longer


def bounds_of(plan: Plan) -> tuple[str, ...]:
    """The parts of the step that are a tenth of it or more, largest first, with what would help."""
    parts = sorted(plan.estimate.breakdown, key=lambda part: -part[1])
    return tuple(
        f"{name} {seconds / plan.estimate.step_s:.0%}"
        + (f" (helped by {_REMEDIES[name]})" if name in _REMEDIES else "")
        for name, seconds in parts
        if seconds >= 0.1 * plan.estimate.step_s
    )


def loses_by(best: Plan, other: Plan) -> str:
    """What another plan spends more on."""
    first, second = dict(best.estimate.breakdown), dict(other.estimate.breakdown)
    more = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {*first, *second}}
    lost_s = other.estimate.step_s - best.estimate.step_s
    worst = sorted(more.items(), key=lambda part: (-part[1], part[0]))
    causes = [f"{name} +{seconds:.3g} s" for name, seconds in worst[:2] if seconds > 0.1 * lost_s > 0]
    return f"{lost_s / best.estimate.step_s:.1%} slower" + (f": {', '.join(causes)}" if causes else "")


def changes(plan: Plan, goal: TrainGoal) -> tuple[Change, ...]:
    """One thing different at a time, best first."""
    step_s = plan.estimate.step_s
    found = [Change(what, other_s, 1 - other_s / step_s) for what, other_s in _changed(plan, goal)]
    return tuple(sorted(found, key=lambda change: change.step_s))


def _changed(plan: Plan, goal: TrainGoal) -> Iterator[tuple[str, float]]:
    job, cluster = plan.job, goal.cluster
    node, device = cluster.node, cluster.device
    faster_network = replace(cluster, node=replace(node, nic_bytes_per_s=2 * node.nic_bytes_per_s))
    faster_links = replace(device, link_bytes_per_s=2 * device.link_bytes_per_s)
    yield "twice the network", estimate(job, faster_network, explain=False).step_s
    linked = replace(cluster, node=replace(node, device=faster_links))
    yield "twice the scale-up links", estimate(job, linked, explain=False).step_s
    roomier = search(replace(goal, memory_bytes=2 * goal.memory_limit_bytes), _around(job), keep=1).plans
    if roomier:
        yield "twice the memory", min(roomier[0].estimate.step_s, plan.estimate.step_s)
    if twice := _try(job, global_batch=2 * job.global_batch):
        yield "twice the batch, for as many tokens", estimate(twice, cluster, explain=False).step_s / 2
    for schedule in FAMILIES if job.layout.pp > 1 else ():
        layout = replace(job.layout, schedule=schedule, chunks_per_stage=None)
        other = _try(job, layout=layout) if schedule != job.layout.schedule else None
        if other and peak_memory(other).total <= goal.memory_limit_bytes:
            yield f"schedule {schedule}", estimate(other, cluster, explain=False).step_s


def _around(job: TrainJob) -> Choices:
    """For a quick second look: sequence parallelism as the plan has it."""
    return Choices(sequence_parallel=(job.layout.sequence_parallel,) if job.layout.tp > 1 else (True,))


def _try(job: TrainJob, **different: object) -> TrainJob | None:
    try:
        return replace(job, **different)  # type: ignore[arg-type]
    except ConfigError:
        return None
