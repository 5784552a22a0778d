"""Fair shares between tenants: the one with the least of its dominant resource is next (DRF, Ghodsi et al.,
NSDI 2011), within quotas, with borrowing of what others leave unused, and reclaiming when they come back.
"""

import itertools
from collections.abc import Iterator

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement
from cumulo.cluster.decide.fit import Placer, tell_stopped
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.policy.guaranteed import GuaranteedJobs
from cumulo.cluster.decide.policy.preemptible import preemptible_on_nodes
from cumulo.cluster.decide.policy.preemption import RoomSearch, fits, watch_running
from cumulo.cluster.decide.policy.queueing import queue_policy
from cumulo.cluster.decide.policy.share_order import ShareOrder
from cumulo.cluster.decide.quotas import TenantUses, tenant_uses
from cumulo.cluster.decide.shapes import ShapeKey, shape_key
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_MOST_TRIED = 200  # waiting jobs of tenants below their quotas


def fair(place: Placer) -> Policy:
    """`ShareOrder` with backfill, and reclaiming: a tenant below its quota gets back what others borrowed, the
    youngest borrower first, because it loses least."""
    order, guaranteed = ShareOrder(), GuaranteedJobs()
    fill = queue_policy(order, place, backfill=True, reason="its tenant has the least", by_tenant=order.lines)

    def policy(snapshot: Snapshot) -> list[Decision]:
        reclaimed: list[Decision] = []
        if snapshot.quotas:
            watch_running(snapshot, _tenant)
            uses = tenant_uses(snapshot, preemptible_on_nodes(snapshot, _tenant))
            reclaimed = _reclaim(guaranteed.in_order(snapshot, uses), snapshot, place, uses)
        return reclaimed or fill(snapshot)

    return policy


def _reclaim(
    waiting: Iterator[JobRequest], snapshot: Snapshot, place: Placer, uses: TenantUses
) -> list[Decision]:
    """For the first of these that fits with what others borrowed."""
    tried: set[tuple[str, ShapeKey]] = set()
    for job in itertools.islice(waiting, _MOST_TRIED):
        if job.gpus > -uses.over(job.tenant) + 1e-9 or (job.tenant, shape_key(job)) in tried:
            continue
        tried.add((job.tenant, shape_key(job)))
        if fits(job, snapshot.free, place):
            return []  # it fits without
        found = _borrowers(job, snapshot, uses).find()
        if found is None:
            continue
        tell_stopped(place, found[0])
        places = place(job, found[1])
        if places is None:
            continue
        why = f"its tenant borrowed GPUs that tenant {job.tenant} is guaranteed"
        return [
            *(Eviction(one.job_id, why) for one in found[0]),
            JobPlacement(job.job_id, places, "guaranteed by its tenant's quota"),
        ]
    return []


def _borrowers(job: JobRequest, snapshot: Snapshot, uses: TenantUses) -> RoomSearch:
    """Jobs whose tenants are over their quotas, the youngest first; as many as bring the tenant back to it."""

    def may_stop(one: RunningJob, chosen: list[RunningJob]) -> bool:
        tenant = one.request.tenant
        if tenant not in uses.borrowing:
            return False
        back = sum(other.gpus for other in chosen if other.request.tenant == tenant)
        return uses.over(tenant) - back > 1e-9

    return RoomSearch(job, snapshot, lambda: uses.borrowed, may_stop, lambda one: (-one.started_s,))


def _tenant(job: RunningJob) -> str:
    return job.request.tenant
