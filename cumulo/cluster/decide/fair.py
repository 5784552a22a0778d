"""Fair shares between tenants: the one with the least of its dominant resource is next (DRF, Ghodsi et al.,
NSDI 2011), within quotas, with borrowing of what others leave unused, and reclaiming when they come back.
"""

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement
from cumulo.cluster.decide.fit import Placer, PlacerOf, slots
from cumulo.cluster.decide.jobs import GangShape, RunningJob
from cumulo.cluster.decide.preemption import RoomSearch, jobs_on_nodes
from cumulo.cluster.decide.queueing import by_share, queue_policy
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_MOST_TRIED = 200  # waiting jobs of tenants below their quotas
_LITTLE = 1e-9


def fair(place: PlacerOf) -> Policy:
    """The order of shares with backfill, and reclaiming: a tenant below its quota gets back what others borrowed,
    the youngest borrower first, because it loses least."""
    fill = queue_policy(by_share, place, backfill=True, reason="its tenant has the least")

    def policy(snapshot: Snapshot) -> list[Decision]:
        reclaimed = _reclaim(snapshot, place(snapshot)) if snapshot.quotas and snapshot.waiting else []
        return reclaimed or fill(snapshot)

    return policy


def _reclaim(snapshot: Snapshot, placer: Placer) -> list[Decision]:
    """For the first job that its tenant's quota guarantees and that fits with what others borrowed."""
    book = QuotaBook(snapshot)
    below = [name for name in snapshot.quotas if book.over(name) < 0]
    borrowing = {name for name in snapshot.quotas if book.over(name) > _LITTLE}
    if not below or not borrowing:
        return []
    order = {name: number for number, name in enumerate(snapshot.quotas)}
    guaranteed = [job for job in snapshot.waiting if job.tenant in below]
    guaranteed.sort(key=lambda job: (job.arrival_s, order[job.tenant]))
    tried: set[tuple[str, GangShape]] = set()
    running = snapshot.running.values()
    borrowers = [one for one in running if one.request.preemptible and one.request.tenant in borrowing]
    without, on = None, jobs_on_nodes(snapshot.free, borrowers)

    def may_stop(one: RunningJob, chosen: list[RunningJob]) -> bool:
        """Whether a stop brings its tenant back to its quota."""
        tenant = one.request.tenant
        back = sum(other.gpus for other in chosen if other.request.tenant == tenant)
        return book.over(tenant) - back > _LITTLE

    for job in guaranteed[:_MOST_TRIED]:
        if job.gpus > _LITTLE - book.over(job.tenant) or (job.tenant, job.shape) in tried:
            continue
        tried.add((job.tenant, job.shape))
        if slots(job, snapshot.free) >= job.tasks:
            return []  # it fits without
        without = without or snapshot.free.without(borrowers)
        found = RoomSearch(job, snapshot.free, on, lambda one: (-one.started_s,), may_stop, without).find()
        if found is None:
            continue
        for one in found[0]:
            placer.stopped(one.request, one.places)
        places = placer.places(job, found[1])
        assert places is not None  # there is room
        why = f"its tenant borrowed GPUs that tenant {job.tenant} is guaranteed"
        return [
            *(Eviction(one.job_id, why) for one in found[0]),
            JobPlacement(job.job_id, places, "guaranteed by its tenant's quota"),
        ]
    return []
