"""Fair shares between tenants: the one with the least of its dominant resource is next (DRF, Ghodsi et al.,
NSDI 2011), within quotas, with borrowing of what others leave unused, and reclaiming when they come back.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement
from cumulo.cluster.decide.fit import only_gpus, slots
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.queue import tenant_queues
from cumulo.cluster.decide.queueing import Placer, by_priority, queue_policy
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.running import gpus_by_tenant, table_of
from cumulo.cluster.decide.snapshot import Policy, Snapshot


def by_share(snapshot: Snapshot) -> Iterator[JobRequest]:
    """Jobs one by one from the tenant with the smallest weighted dominant share; what is tried counts as had, so
    that a tenant whose job does not fit does not hold up all others."""
    total_gpus, total_cpu = snapshot.free.capacity
    running = table_of(snapshot.running)
    queues = tenant_queues(snapshot.waiting)
    heap: list[tuple[float, float, str, int, float, float]] = []

    def push(tenant: str, at: int, gpus: float, cpu: float) -> None:
        quota = snapshot.quotas.get(tenant)
        share = max(gpus / total_gpus, cpu / total_cpu) / max(quota.weight if quota else 1.0, 1e-9)
        heapq.heappush(heap, (share, queues[tenant][at].arrival_s, tenant, at, gpus, cpu))

    for tenant in queues:
        push(tenant, 0, running.milli[tenant] / WHOLE_GPU, float(running.cpu_milli[tenant]))
    while heap:
        _, _, tenant, at, gpus, cpu = heapq.heappop(heap)
        job = queues[tenant][at]
        if at + 1 < len(queues[tenant]):
            push(tenant, at + 1, gpus + job.gpus, cpu + job.tasks * job.cpu_milli)
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
    used = gpus_by_tenant(snapshot.running)
    for job in snapshot.waiting:
        quota = snapshot.quotas.get(job.tenant)
        if quota is None or used.get(job.tenant, 0.0) + job.gpus > quota.gpus + 1e-9:
            continue
        if _fits(job, snapshot.free, place):
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
    job: JobRequest, victims: Iterable[RunningJob], free: FreeCapacity, place: Placer
) -> tuple[list[RunningJob] | None, FreeCapacity | None]:
    """The first victims that make room for the job, and none that turn out not to be needed."""
    then = free.copy()
    chosen: list[RunningJob] = []
    for one in victims:
        then.give(one.request, one.places)
        chosen.append(one)
        if _fits(job, then, place):
            break
    else:
        return None, None
    for one in list(chosen[:-1]):
        then.take(one.request, one.places)
        if not _fits(job, then, place):
            then.give(one.request, one.places)
        else:
            chosen.remove(one)
    return chosen, then


def _fits(job: JobRequest, free: FreeCapacity, place: Placer) -> bool:
    """Every placer finds places for a gang of whole GPUs where there are enough: counting them will do."""
    return slots(job, free) >= job.tasks if only_gpus(job) else place(job, free) is not None


def preempting(place: Placer) -> Policy:
    """Priorities: a job may stop those of lower priority, if what it saves is worth what they lose: a
    checkpoint each, counted in GPU seconds, against its waiting until one of them would have ended."""
    fill = queue_policy(by_priority, place, backfill=True, reason="the most urgent that fits")

    def policy(snapshot: Snapshot) -> list[Decision]:
        book, preemptible = QuotaBook(snapshot), table_of(snapshot.running).preemptible
        lowest = min((priority for priority, jobs in preemptible.items() if jobs), default=None)
        for job in itertools.islice(by_priority(snapshot), 20):
            if lowest is None or job.priority <= lowest:
                break  # nor may any behind it
            if _fits(job, snapshot.free, place) or book.refuses(job) is not None:
                continue
            chosen, free = _enough(job, _lower(snapshot, job), snapshot.free, place)
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


def _lower(snapshot: Snapshot, job: JobRequest) -> list[RunningJob]:
    """Who may be stopped for this job: the least urgent first, then those that lose least."""
    lower = [
        one for one in snapshot.running.values()
        if one.request.priority < job.priority and one.request.preemptible
    ]  # fmt: skip
    lower.sort(key=lambda one: (one.request.priority, one.gpus * one.request.checkpoint_s, -one.started_s))
    return lower
