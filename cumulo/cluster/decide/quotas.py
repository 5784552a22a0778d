"""What tenants have, their fair shares and their quotas. Every policy asks whether one more job may start."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, nan

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota
from cumulo.errors import ConfigError

_LITTLE = 1e-9  # rounding errors of GPUs


def read_quota(text: str) -> TenantQuota:
    """`read_quota("research=8+4")`: guaranteed 8 GPUs, and 4 more while others do not use theirs."""
    name, _, size = text.partition("=")
    own, _, borrowed = size.partition("+")
    try:
        amounts = float(own), float(borrowed or 0)
    except ValueError:
        amounts = nan, nan
    if not all(0 <= amount < inf for amount in amounts):
        raise ConfigError(f"--quota {text}: write TENANT=GPUS or TENANT=GPUS+BORROWED")
    return TenantQuota(name, *amounts)


@dataclass(slots=True)
class TenantUse:
    """Thousandths of GPUs and of cores of a tenant's jobs: integers, so that sums do not depend on their
    order."""

    gpu_milli: int = 0
    cpu_milli: int = 0

    def add(self, job: JobRequest, tasks: int) -> None:
        self.gpu_milli += tasks * job.milli_per_task
        self.cpu_milli += tasks * job.cpu_milli

    @property
    def gpus(self) -> float:
        return self.gpu_milli / WHOLE_GPU


def tenant_use(snapshot: Snapshot) -> dict[str, TenantUse]:
    """What the running jobs of each tenant have."""
    found: dict[str, TenantUse] = {}
    for one in snapshot.running.values():
        found.setdefault(one.request.tenant, TenantUse()).add(one.request, one.tasks)
    return found


def dominant_share(use: TenantUse, total: TenantUse, weight: float) -> float:
    """The larger of a tenant's shares of all GPUs and of all cores, over its weight (DRF, Ghodsi et al.,
    2011)."""
    return max(use.gpu_milli / total.gpu_milli, use.cpu_milli / total.cpu_milli) / max(weight, _LITTLE)


class QuotaBook:
    """The GPUs of tenants while a decision is made."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.quotas: Mapping[str, TenantQuota] = snapshot.quotas
        use = tenant_use(snapshot) if snapshot.quotas else {}
        self.used = {name: use[name].gpus if name in use else 0.0 for name in snapshot.quotas}

    def refuses(self, job: JobRequest, gpus: float | None = None) -> str | None:
        """Why a job, or one with so many GPUs, may not start now although it may fit; None: it may."""
        if (job.gpus if gpus is None else gpus) <= self.left_to(job.tenant):
            return None
        used, most = self.used[job.tenant], self.quotas[job.tenant].most_gpus
        return f"tenant {job.tenant} has {used:g} GPUs, its limit is {most:g}"

    def left_to(self, tenant: str) -> float:
        """How many more GPUs the tenant may have; negative: it has too many."""
        quota = self.quotas.get(tenant)
        return inf if quota is None else quota.most_gpus + _LITTLE - self.used[tenant]

    def over(self, tenant: str) -> float:
        """GPUs more than a tenant with a quota is guaranteed; negative: it has less."""
        return self.used[tenant] - self.quotas[tenant].gpus

    def count(self, job: JobRequest, gpus: float) -> None:
        """A job of the tenant gains so many GPUs, or loses them."""
        if job.tenant in self.used:
            self.used[job.tenant] += gpus
