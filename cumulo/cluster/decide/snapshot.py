"""A cluster at one moment: all that a policy may look at, whoever carries its decisions out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from cumulo.cluster.decide.decisions import Decision
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, free_capacity


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """GPUs a tenant is guaranteed, and how many more it may borrow while others do not use theirs."""

    tenant: str
    gpus: float
    borrow_gpus: float = 0.0
    weight: float = 1.0  # of its fair share

    @property
    def most_gpus(self) -> float:
        return self.gpus + self.borrow_gpus


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The nodes, the jobs that wait in the order of arrival, and the jobs that run. Nothing in it can be changed:
    policies try placements on `free.copy()`. A policy decides by this alone and keeps nothing for the next one."""

    now_s: float
    nodes: Sequence[ClusterNode]
    waiting: Sequence[JobRequest]
    running: Mapping[str, RunningJob]
    free: FreeCapacity
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)


Policy = Callable[[Snapshot], list[Decision]]


def snapshot_of(
    now_s: float, nodes: Sequence[ClusterNode], waiting: Sequence[JobRequest], running: Sequence[RunningJob],
    quotas: Sequence[TenantQuota] = (),
) -> Snapshot:  # fmt: skip
    """What a driver builds from the jobs it knows: the free capacity is worked out here."""
    in_order = sorted(waiting, key=lambda job: job.arrival_s)
    return Snapshot(
        now_s, tuple(nodes), tuple(in_order), MappingProxyType({job.job_id: job for job in running}),
        free_capacity(nodes, running).read_only(), {quota.tenant: quota for quota in quotas},
    )  # fmt: skip
