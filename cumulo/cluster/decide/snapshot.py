"""A cluster at one moment: all that a policy may look at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cumulo.cluster.decide.decisions import Decision
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, free_capacity
from cumulo.cluster.decide.releases import Releases
from cumulo.cluster.decide.running import RunningTable


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """GPUs a tenant is guaranteed, and how many more it may borrow while others do not use theirs."""

    tenant: str
    gpus: float
    borrow_gpus: float = 0.0
    weight: float = 1.0  # of its fair share


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Nodes, what waits in the order of arrival, what runs. Policies never change it: they try on
    `free.copy()`."""

    now_s: float
    nodes: Sequence[ClusterNode]
    waiting: Sequence[JobRequest]
    running: Mapping[str, RunningJob]
    free: FreeCapacity
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)
    releases: Releases | None = None  # when GPUs become free; None: worked out when it is asked for


@dataclass(frozen=True, slots=True)
class SameState:
    """Tells whether nothing started, ended or became ready since: what was found then is still right."""

    running: Mapping[str, RunningJob]
    changes: int
    free: FreeCapacity
    gains: int

    @classmethod
    def noted(cls, snapshot: Snapshot) -> "SameState | None":
        """None: nobody counts the changes."""
        running, free = snapshot.running, snapshot.free
        return cls(running, running.changes, free, free.gains) if isinstance(running, RunningTable) else None

    def holds(self, snapshot: Snapshot) -> bool:
        return (
            self.running is snapshot.running
            and isinstance(self.running, RunningTable)
            and self.running.changes == self.changes
            and self.free is snapshot.free
            and self.free.gains == self.gains
        )


Policy = Callable[[Snapshot], list[Decision]]


def snapshot_of(
    now_s: float, nodes: Sequence[ClusterNode], waiting: Sequence[JobRequest], running: Sequence[RunningJob],
    quotas: Sequence[TenantQuota] = (),
) -> Snapshot:  # fmt: skip
    """What a driver builds from the jobs it knows: the free capacity is worked out here."""
    return Snapshot(
        now_s, tuple(nodes), tuple(waiting), RunningTable(running),
        free_capacity(nodes, running), {quota.tenant: quota for quota in quotas},
    )  # fmt: skip
