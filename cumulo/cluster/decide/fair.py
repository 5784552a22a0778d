"""Fair shares between tenants: the one with the least of its dominant resource is next (DRF, Ghodsi et al.,
NSDI 2011), within quotas, with borrowing of what others leave unused, and reclaiming when they come back.
"""

from collections import deque
from collections.abc import Iterator

from cumulo.cluster.decide.check import tenant_gpus
from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.queueing import Placer, queue_policy
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot, TenantQuota


def by_share(snapshot: Snapshot) -> Iterator[JobRequest]:
    """Jobs one by one from the tenant with the smallest weighted dominant share; what is tried counts as had, so
    that a tenant whose job does not fit does not hold up all others."""
    free = snapshot.free
    total_gpus = max(1.0, float(free.gpus.sum()))
    total_cpu = max(1.0, float(sum(node.cpu_milli for node in snapshot.nodes)))
    shares: dict[str, tuple[float, float]] = {}
    for running in snapshot.running.values():
        gpu, cpu = shares.get(running.request.tenant, (0.0, 0.0))
        shares[running.request.tenant] = (gpu + running.gpus, cpu + running.tasks * running.request.cpu_milli)
    queues: dict[str, deque[JobRequest]] = {}
    for job in snapshot.waiting:
        queues.setdefault(job.tenant, deque()).append(job)

    def dominant(tenant: str) -> tuple[float, float, str]:
        gpu, cpu = shares.get(tenant, (0.0, 0.0))
        weight = snapshot.quotas.get(tenant, TenantQuota(tenant, 0.0)).weight
        return max(gpu / total_gpus, cpu / total_cpu) / max(weight, 1e-9), queues[tenant][0].arrival_s, tenant

    while queues:
        tenant = min(queues, key=dominant)
        job = queues[tenant].popleft()
        if not queues[tenant]:
            del queues[tenant]
        gpu, cpu = shares.get(tenant, (0.0, 0.0))
        shares[tenant] = (gpu + job.gpus, cpu + job.tasks * job.cpu_milli)
        yield job


def fair(place: Placer) -> Policy:
    """`by_share` with backfill, and reclaiming: a tenant below its quota gets back what others borrowed, the
    youngest borrower first, because it loses least."""
    fill = queue_policy(by_share, place, backfill=True, reason="its tenant has the least")

    def policy(snapshot: Snapshot) -> list[Decision]:
        reclaimed = _reclaim(snapshot, place) if snapshot.quotas else []
        return reclaimed or fill(snapshot)

    return policy


def _reclaim(snapshot: Snapshot, place: Placer) -> list[Decision]:
    used = tenant_gpus(snapshot)
    for job in snapshot.waiting:
        quota = snapshot.quotas.get(job.tenant)
        if quota is None or used.get(job.tenant, 0.0) + job.gpus > quota.gpus + 1e-9:
            continue
        if place(job, snapshot.free) is not None:
            return []  # it fits without
        victims = _borrowers(snapshot, used)
        chosen, free = _enough(job, victims, snapshot.free, place)
        if chosen is None or free is None:
            continue
        places = place(job, free)
        if places is None:
            continue
        why = f"its tenant borrowed GPUs that tenant {job.tenant} is guaranteed"
        return [
            *(Eviction(one.job_id, why) for one in chosen),
            JobPlacement(job.job_id, places, "guaranteed by its tenant's quota"),
        ]
    return []


def _borrowers(snapshot: Snapshot, used: dict[str, float]) -> list[RunningJob]:
    """Jobs whose tenants are over their quotas, the youngest first; as many as bring the tenant back to it."""
    over = {name: used.get(name, 0.0) - quota.gpus for name, quota in snapshot.quotas.items() if name in used}
    found = []
    for one in sorted(snapshot.running.values(), key=lambda job: -job.started_s):
        if one.request.preemptible and over.get(one.request.tenant, 0.0) > 1e-9:
            over[one.request.tenant] -= one.gpus
            found.append(one)
    return found


def _enough(
    job: JobRequest, victims: list[RunningJob], free: FreeCapacity, place: Placer
) -> tuple[list[RunningJob] | None, FreeCapacity | None]:
    """The first victims that make room for the job, and none that turn out not to be needed."""
    then = free.copy()
    chosen: list[RunningJob] = []
    for one in victims:
        then.give(one.request, one.places)
        chosen.append(one)
        if place(job, then) is not None:
            break
    else:
        return None, None
    for one in list(chosen[:-1]):
        then.take(one.request, one.places)
        if place(job, then) is None:
            then.give(one.request, one.places)
        else:
            chosen.remove(one)
    return chosen, then


def preempting(place: Placer) -> Policy:
    """Priorities: a job may stop those of lower priority, if what it saves is worth what they lose: a
    checkpoint each, counted in GPU seconds, against its waiting until one of them would have ended."""
    fill = queue_policy(_urgent_first, place, backfill=True, reason="the most urgent that fits")

    def policy(snapshot: Snapshot) -> list[Decision]:
        for job in list(_urgent_first(snapshot))[:20]:
            if place(job, snapshot.free) is not None or QuotaBook(snapshot).refuses(job) is not None:
                continue
            lower = [
                one for one in snapshot.running.values()
                if one.request.priority < job.priority and one.request.preemptible
            ]  # fmt: skip
            lower.sort(
                key=lambda one: (one.request.priority, one.gpus * one.request.checkpoint_s, -one.started_s)
            )
            chosen, free = _enough(job, lower, snapshot.free, place)
            if chosen is None or free is None:
                continue
            lost = sum(one.gpus * one.request.checkpoint_s for one in chosen)
            ends = [one.expected_end_s for one in chosen if one.expected_end_s is not None]
            waits_s = min(ends) - snapshot.now_s if ends else float("inf")
            if lost > job.gpus * max(0.0, waits_s):
                continue  # waiting is cheaper
            places = place(job, free)
            if places is not None:
                why = f"{job.job_id} has priority {job.priority}; the checkpoints cost {lost:.0f} GPU seconds"
                return [*(Eviction(one.job_id, why) for one in chosen),
                        JobPlacement(job.job_id, places, "its priority")]  # fmt: skip
        return fill(snapshot)

    return policy


def _urgent_first(snapshot: Snapshot) -> list[JobRequest]:
    return sorted(snapshot.waiting, key=lambda job: (-job.priority, job.arrival_s))
