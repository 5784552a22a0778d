"""What a played trace comes to: job completion times, waiting, utilisation, fairness, per tenant."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from cumulo.base.quantiles import jain_index, percentile
from cumulo.cluster.decide.decisions import Decision
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode


class JobOutcome(NamedTuple):
    """One finished job. Seconds of the trace's clock."""

    job_id: str
    tenant: str
    gpus: float
    arrival_s: float
    start_s: float
    end_s: float
    alone_s: float  # what it takes on a cluster of its own, as asked for
    restarts: int
    resizes: int
    gpu_s: float
    why: str

    @property
    def jct_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def wait_s(self) -> float:
        return self.start_s - self.arrival_s

    @property
    def slowdown(self) -> float:
        return self.jct_s / max(self.alone_s, 1.0)


class Segment(NamedTuple):  # one for every start of a job: as a tuple it is made in a third of the time
    """A bar of the Gantt chart: one run of a job on its places."""

    job_id: str
    begin_s: float
    end_s: float
    places: tuple[TaskPlace, ...]


@dataclass
class ClusterRun:
    """One trace under one policy."""

    nodes: Sequence[ClusterNode]
    outcomes: list[JobOutcome] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    unfinished: list[JobRequest] = field(default_factory=list)
    impossible: list[JobRequest] = field(default_factory=list)  # too large for the whole cluster, left out
    log: list[tuple[float, tuple[Decision, ...]]] = field(default_factory=list)
    cordoned: list[str] = field(default_factory=list)
    decisions: int = 0
    slowest_decision_s: float = 0.0  # CPU time of the policy
    evictions: int = 0
    resizes: int = 0
    node_failures: int = 0
    lost_work: float = 0.0
    used_gpu_s: float = 0.0
    end_s: float = 0.0

    @cached_property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def begin_s(self) -> float:
        return min((one.arrival_s for one in self.outcomes), default=0.0)

    @property
    def makespan_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def mean_jct_s(self) -> float:
        return statistics.fmean(one.jct_s for one in self.outcomes) if self.outcomes else 0.0

    @property
    def mean_wait_s(self) -> float:
        return statistics.fmean(one.wait_s for one in self.outcomes) if self.outcomes else 0.0

    @property
    def utilisation(self) -> float:
        """Share of all GPU time, from the first arrival to the last end, that jobs held."""
        return self.used_gpu_s / (self.gpus * self.makespan_s) if self.makespan_s > 0 else 0.0

    def percentile_jct_s(self, percent: float) -> float:
        return percentile([one.jct_s for one in self.outcomes], percent / 100) or 0.0

    @property
    def fairness(self) -> float:
        """Jain's index over the tenants' mean slowdown: 1 is equal treatment, 1/tenants the opposite."""
        means = [row["mean_slowdown"] for row in self.per_tenant.values()]
        return jain_index(means)

    @property
    def per_tenant(self) -> dict[str, dict[str, float]]:
        by_tenant: dict[str, list[JobOutcome]] = defaultdict(list)
        for one in self.outcomes:
            by_tenant[one.tenant].append(one)
        return {
            name: {
                "jobs": len(some),
                "gpu_hours": sum(one.gpu_s for one in some) / 3600,
                "mean_jct_s": statistics.fmean(one.jct_s for one in some),
                "mean_wait_s": statistics.fmean(one.wait_s for one in some),
                "mean_slowdown": statistics.fmean(one.slowdown for one in some),
            }
            for name, some in sorted(by_tenant.items())
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "jobs": len(self.outcomes), "mean_jct_s": self.mean_jct_s, "p50_jct_s": self.percentile_jct_s(50),
            "p99_jct_s": self.percentile_jct_s(99), "mean_wait_s": self.mean_wait_s, "makespan_s": self.makespan_s,
            "utilisation": self.utilisation, "fairness": self.fairness,
            "decisions": self.decisions,
            "evictions": self.evictions, "resizes": self.resizes, "node_failures": self.node_failures,
            "cordoned": self.cordoned, "unfinished": len(self.unfinished), "impossible": len(self.impossible),
            "tenants": self.per_tenant,
        }  # fmt: skip
