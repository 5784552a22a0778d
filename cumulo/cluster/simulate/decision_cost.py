"""What scheduling decisions cost: `cumulo bench cluster` plays a synthetic trace on many nodes under each policy.

Times are CPU seconds of the deciding thread, so that neither other programs nor the progress bar count.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cumulo.base.quantiles import percentile
from cumulo.base.report import Row, shown
from cumulo.cluster.decide.decisions import Decision
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.policies import NamedPolicy, policy_named
from cumulo.cluster.decide.snapshot import Snapshot
from cumulo.cluster.decide.step_time import leaf_fabric
from cumulo.cluster.simulate.job_speed import ElasticSpeed, JobSpeed, LeafSpeed
from cumulo.cluster.simulate.play import ROUND_S, PlayOptions, play, usual_interval_s
from cumulo.cluster.simulate.workloads import ClusterWorkload, WorkloadSize, check_name, workload_named

_UPDATES = 100  # of the progress, in one trace

Progress = Callable[[str, int, int], None]  # what is played, jobs that ended, all jobs


def _no_progress(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """One policy on one trace."""

    policy: str
    workload: str
    load: float
    whole_s: float
    decisions: int
    worst_ms: float
    p99_ms: float
    longest_queue: int
    mean_wait_s: float

    @property
    def name(self) -> str:
        return named(self.policy, self.workload, self.load)

    @property
    def rows(self) -> list[Row]:
        note = f"{self.decisions:,} decisions, up to {self.longest_queue:,} jobs waiting"
        return [
            Row(f"{self.name}: whole trace", self.whole_s, "s", "lower", note=note),
            Row(f"{self.name}: slowest decision", self.worst_ms, "ms", "lower"),
            Row(f"{self.name}: decision p99", self.p99_ms, "ms", "lower"),
        ]

    @property
    def line(self) -> str:
        """All of it in one line, for who waits for the other policies."""
        whole, worst, p99 = self.rows
        return (
            f"{self.name}: whole trace {shown(whole)}, slowest decision {shown(worst)}, p99 {shown(p99)}, "
            f"{whole.note}"
        )


def named(policy: str, workload: str, load: float) -> str:
    """The usual workload is not named."""
    return f"{policy}, {'' if workload == 'usual' else workload + ', '}load {load:g}"


def measure(
    policies: Sequence[str],
    workloads: Sequence[str],
    loads: Sequence[float],
    size: WorkloadSize,
    found: Callable[[PolicyCost], None] = lambda _: None,
    progress: Progress = _no_progress,
) -> list[Row]:
    """`found` is told of each policy as soon as it is measured, `progress` of the jobs that ended."""
    for name in policies:
        policy_named(name)  # a wrong name is told now, and not after an hour
    for name in workloads:
        check_name(name)
    rows = []
    for workload in workloads:
        for load in loads:
            for name in policies:
                one = cost(policy_named(name), workload, replace(size, load=load), progress)
                found(one)
                rows += one.rows
    return rows


def _speed(policy: NamedPolicy, cluster: Sequence[ClusterNode]) -> JobSpeed | None:
    if policy.resizes:
        return ElasticSpeed()
    return LeafSpeed(leaf_fabric(cluster)) if "topology" in policy.name else None


def workload_for(policy: NamedPolicy, workload: str, size: WorkloadSize) -> ClusterWorkload:
    """For policies that resize, every job is elastic; for those that look at the network, gangs exchange data in
    every step."""
    size = replace(size, elastic=policy.resizes, steps="topology" in policy.name)
    return workload_named(workload, size)


def cost(
    policy: NamedPolicy, workload: str, size: WorkloadSize, progress: Progress = _no_progress
) -> PolicyCost:
    name = named(policy.name, workload, size.load)
    progress(name, 0, size.jobs)
    seconds: list[float] = []
    longest = 0
    played = workload_for(policy, workload, size)

    def timed(snapshot: Snapshot) -> list[Decision]:
        nonlocal longest
        longest = max(longest, len(snapshot.waiting))
        began_s = time.thread_time()
        decided = policy.decide(snapshot)
        seconds.append(time.thread_time() - began_s)
        return decided

    every = max(1, size.jobs // _UPDATES)

    def told(done: int, total: int) -> None:
        if done % every == 0:
            progress(name, done, total)

    interval_s = ROUND_S if policy.in_rounds else usual_interval_s(policy, size.jobs)
    options = PlayOptions(
        interval_s=interval_s, always_decide=policy.always_decide, quotas=played.quotas,
        failures=played.failures, seed=size.seed, told=told,
    )  # fmt: skip
    speed = _speed(policy, played.nodes)
    began_s = time.thread_time()
    run = play(played.nodes, played.trace, timed, speed, options)
    whole_s = time.thread_time() - began_s
    return PolicyCost(
        policy.name, workload, size.load, whole_s, len(seconds), 1e3 * max(seconds),
        1e3 * (percentile(seconds, 0.99) or 0.0), longest, run.mean_wait_s,
    )  # fmt: skip
