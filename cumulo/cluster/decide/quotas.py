"""Quotas of tenants. Every policy asks whether one more job may start; `fair` also asks which tenants have less
than their quotas and which have borrowed, before it reclaims.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from math import inf

import numpy as np

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob
from cumulo.cluster.decide.nodes import Ints
from cumulo.cluster.decide.running import RunningTable, RunningView, table_of
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota

_LITTLE = 1e-9


class QuotaBook:
    """The tenants' GPUs while a decision is made."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.quotas = snapshot.quotas
        self._milli = table_of(snapshot.running).milli if snapshot.quotas else {}
        self._used: dict[str, float] = {}  # of the tenants that were asked for
        self.most_gpus = inf  # of a job that may start, as far as is known: nobody asks for larger ones

    def refuses(self, job: JobRequest, gpus: float | None = None) -> str | None:
        """Why a job may not start now although it may fit; None: it may."""
        if self.allows(job.tenant, job.gpus if gpus is None else gpus):
            return None
        quota = self.quotas[job.tenant]
        return _at_its_limit(job.tenant, self.used(job.tenant), quota.gpus + quota.borrow_gpus)

    def allows(self, tenant: str, gpus: float) -> bool:
        """Whether a job of so many GPUs may start now, if it fits."""
        quota = self.quotas.get(tenant)
        if quota is None:
            return True
        known = self._used.get(tenant)
        has = self._milli.get(tenant, 0) / WHOLE_GPU if known is None else known
        return has + gpus <= quota.gpus + quota.borrow_gpus + _LITTLE

    def left_to(self, tenant: str) -> float:
        """So many GPUs more it may have; negative: it has too many."""
        quota = self.quotas.get(tenant)
        if quota is None:
            return float("inf")
        return quota.gpus + quota.borrow_gpus + _LITTLE - self.used(tenant)

    def left_to_each(self, tenants: Sequence[str]) -> list[float]:
        """The same of many, of whom most were not asked for before."""
        if self._used or not self.quotas:
            return [self.left_to(tenant) for tenant in tenants]
        quotas, milli = self.quotas, self._milli
        return [
            inf
            if (quota := quotas.get(name)) is None
            else quota.gpus + quota.borrow_gpus + _LITTLE - milli.get(name, 0) / WHOLE_GPU
            for name in tenants
        ]

    def count(self, job: JobRequest, gpus: float) -> None:
        """A job of the tenant gains so many GPUs, or loses them."""
        if self.quotas:
            self._used[job.tenant] = self.used(job.tenant) + gpus

    def used(self, tenant: str) -> float:
        known = self._used.get(tenant)
        return self._milli.get(tenant, 0) / WHOLE_GPU if known is None else known


@lru_cache(maxsize=4096)
def _at_its_limit(tenant: str, has: float, most: float) -> str:
    """Worded once for all jobs of a tenant, and for all decisions until it has more or less."""
    return f"tenant {tenant} has {has:g} GPUs, its limit is {most:g}"


class TenantUses(RunningView):
    """The tenants below and above their quotas, kept up to date with the jobs that start and end: with a thousand
    tenants a decision looks at those that changed. `columns`: what the preemptible jobs of each tenant have on each
    node; a view that is older than this one, so that it is up to date first."""

    def __init__(
        self,
        quotas: Mapping[str, TenantQuota],
        running: RunningTable,
        columns: Mapping[Hashable, Ints],
        index: Mapping[str, int],
    ) -> None:
        self.quotas, self._milli, self._columns, self._index = quotas, running.milli, columns, index
        self.order = {name: number for number, name in enumerate(quotas)}  # of the quotas
        self.below = {name for name in quotas if self.over(name) < 0}
        self.borrowing = {name for name in quotas if self.over(name) > _LITTLE}
        self.borrowed: Ints = np.zeros((3, len(index)), dtype=np.int64)  # by all of them, on each node
        for name in self.borrowing & columns.keys():
            self.borrowed += columns[name]
        self.begun = False  # the jobs that ran before are counted already

    def over(self, tenant: str) -> float:
        """GPUs more than its quota; negative: it has less."""
        return self._milli.get(tenant, 0) / WHOLE_GPU - self.quotas[tenant].gpus

    def add(self, job: RunningJob) -> None:
        self._move(job, 1)

    def remove(self, job: RunningJob) -> None:
        self._move(job, -1)

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        pass  # it keeps its places

    def _move(self, job: RunningJob, sign: int) -> None:
        request = job.request
        tenant = request.tenant
        if not self.begun or tenant not in self.quotas:
            return
        over, borrowed = self.over(tenant), tenant in self.borrowing
        if borrowed and request.preemptible:
            for place in job.places:
                node = self._index[place.node]
                self.borrowed[0, node] += sign * request.milli_per_task
                self.borrowed[1, node] += sign * request.cpu_milli
                self.borrowed[2, node] += sign * request.memory_mib
        if borrowed != (over > _LITTLE):
            self.borrowing ^= {tenant}
            column = self._columns.get(tenant)
            if column is not None:
                self.borrowed += -column if borrowed else column
        (self.below.add if over < 0 else self.below.discard)(tenant)


def tenant_uses(snapshot: Snapshot, columns: Mapping[Hashable, Ints]) -> TenantUses:
    """Kept from the first time it is asked for."""
    running = table_of(snapshot.running)
    key = TenantUses, id(snapshot.quotas)
    uses = running.view(key, lambda: TenantUses(snapshot.quotas, running, columns, snapshot.free.index))
    uses.begun = True
    return uses
