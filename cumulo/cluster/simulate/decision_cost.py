"""What scheduling decisions cost: `cumulo bench cluster` plays a synthetic trace on many nodes under each policy.

Times are CPU seconds of this process, so that other programs on the machine do not count.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from cumulo.base.report import Row
from cumulo.cluster.decide.decisions import Decision
from cumulo.cluster.decide.jobs import SpeedTable
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.policies import NamedPolicy, policy_named
from cumulo.cluster.decide.snapshot import Snapshot
from cumulo.cluster.decide.step_time import leaf_fabric
from cumulo.cluster.simulate.elastic_speed import ElasticSpeed
from cumulo.cluster.simulate.job_speed import JobSpeed, TraceJob
from cumulo.cluster.simulate.leaf_speed import LeafSpeed
from cumulo.cluster.simulate.play import PlayOptions, play
from cumulo.cluster.simulate.traces import synthetic_trace, uniform_nodes

MUST_WHOLE_S, MUST_DECISION_MS = 60.0, 50.0
# These look at every running job, as the systems they follow do once in a while, and not at every event.
IN_ROUNDS = ("las", "elastic", "goodput", "attained")
ROUND_S = 60.0
NODES_PER_LEAF = 32


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """One policy on one trace."""

    policy: str
    load: float
    whole_s: float
    decisions: int
    worst_ms: float
    p99_ms: float
    longest_queue: int
    mean_wait_s: float

    @property
    def rows(self) -> list[Row]:
        name = f"{self.policy}, load {self.load:g}"
        note = f"{self.decisions:,} decisions, up to {self.longest_queue:,} jobs waiting"
        return [
            Row(f"{name}: whole trace", self.whole_s, "s", "lower", must=MUST_WHOLE_S, note=note),
            Row(f"{name}: slowest decision", self.worst_ms, "ms", "lower", must=MUST_DECISION_MS),
            Row(f"{name}: decision p99", self.p99_ms, "ms", "lower"),
        ]


def measure(
    policies: Sequence[str],
    loads: Sequence[float],
    nodes: int,
    jobs: int,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    found = []
    for load in loads:
        for name in policies:
            tell(f"{name}, load {load:g}")
            policy = policy_named(name)
            found += cost(policy, trace_for(policy, jobs, nodes, load), nodes, load).rows
    return found


def trace_for(policy: NamedPolicy, jobs: int, nodes: int, load: float) -> list[TraceJob]:
    """Every tenth job is urgent, so that preemption has something to do. For policies that resize, every job is
    elastic; for those that look at the network, gangs exchange data in every step."""
    trace = synthetic_trace(jobs, 8 * nodes, load, steps="topology" in policy.name)
    if policy.resizes:
        return [_elastic(job, number) for number, job in enumerate(trace)]
    return [
        replace(job, request=replace(job.request, priority=int(number % 10 == 0)))
        for number, job in enumerate(trace)
    ]


def _elastic(job: TraceJob, number: int) -> TraceJob:
    """Any number of GPUs up to four times what it asks for."""
    asked = int(job.request.gpus)
    request = replace(
        job.request, tasks=asked, gpus_per_task=1, min_tasks=1, max_tasks=4 * asked,
        speed=_table(number % 5, 4 * asked),
    )  # fmt: skip
    return replace(job, request=request)


@cache
def _table(kind: int, most: int) -> SpeedTable:
    """Some jobs scale better than others; beyond a node all scale worse."""
    loss = 0.02 * (kind + 1)
    inside = tuple(size / (1 + loss * (size - 1)) for size in range(1, 9))
    return SpeedTable(inside, tuple(0.8 * size / (1 + loss * (size - 1)) for size in range(1, most + 1)))


def _nodes(nodes: int) -> list[ClusterNode]:
    return uniform_nodes(nodes, 8, NODES_PER_LEAF)


def _speed(policy: NamedPolicy, cluster: Sequence[ClusterNode]) -> JobSpeed | None:
    if policy.resizes:
        return ElasticSpeed()
    return LeafSpeed(leaf_fabric(cluster)) if "topology" in policy.name else None


def cost(policy: NamedPolicy, trace: Sequence[TraceJob], nodes: int, load: float) -> PolicyCost:
    seconds: list[float] = []
    longest = 0

    def timed(snapshot: Snapshot) -> list[Decision]:
        nonlocal longest
        longest = max(longest, len(snapshot.waiting))
        began_s = time.process_time()
        decided = policy.decide(snapshot)
        seconds.append(time.process_time() - began_s)
        return decided

    rounds = policy.name.split("+")[0] in IN_ROUNDS
    options = PlayOptions(interval_s=ROUND_S if rounds else 0.0, always_decide=policy.always_decide)
    cluster = _nodes(nodes)
    speed = _speed(policy, cluster)
    began_s = time.process_time()
    run = play(cluster, trace, timed, speed, options)
    whole_s = time.process_time() - began_s
    seconds.sort()
    return PolicyCost(
        policy.name, load, whole_s, len(seconds), 1e3 * seconds[-1], 1e3 * seconds[int(0.99 * len(seconds))],
        longest, run.mean_wait_s,
    )  # fmt: skip
