"""Quotas of tenants: how many GPUs each has, and whether one more job may start. Every policy asks."""

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.running import gpus_by_tenant
from cumulo.cluster.decide.snapshot import Snapshot


class QuotaBook:
    """The tenants' GPUs while a decision is made."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.quotas = snapshot.quotas
        self.used = gpus_by_tenant(snapshot.running) if snapshot.quotas else {}

    def refuses(self, job: JobRequest, gpus: float | None = None) -> str | None:
        """Why a job may not start now although it may fit; None: it may."""
        quota = self.quotas.get(job.tenant)
        if quota is None:
            return None
        has, most = self.used.get(job.tenant, 0.0), quota.gpus + quota.borrow_gpus
        if has + (job.gpus if gpus is None else gpus) <= most + 1e-9:
            return None
        return f"tenant {job.tenant} has {has:g} GPUs, its limit is {most:g}"

    def count(self, job: JobRequest, gpus: float) -> None:
        """A job of the tenant gains so many GPUs, or loses them."""
        if self.quotas:
            self.used[job.tenant] = self.used.get(job.tenant, 0.0) + gpus
