"""Fair shares between tenants: the one with the least of its dominant resource is next (DRF, Ghodsi et al.,
NSDI 2011), within quotas, with borrowing of what others leave unused, and reclaiming when they come back.
"""

import bisect
import heapq
import itertools
import operator
from collections.abc import Iterator, Mapping

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement
from cumulo.cluster.decide.fit import Placer
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob
from cumulo.cluster.decide.policy.preemptible import preemptible_on_nodes
from cumulo.cluster.decide.policy.preemption import RoomSearch, fits, watch_running
from cumulo.cluster.decide.policy.queueing import queue_policy
from cumulo.cluster.decide.queue import JobQueue, Shape, WaitingRow, shape_key, tenant_queues, tenant_rows
from cumulo.cluster.decide.quotas import TenantUses, tenant_uses
from cumulo.cluster.decide.running import RunningTable, table_of
from cumulo.cluster.decide.snapshot import Policy, Snapshot, TenantQuota

_MOST_TRIED = 200  # waiting jobs of tenants below their quotas


class ShareOrder:
    """Jobs one by one from the tenant with the smallest weighted dominant share; what is tried counts as had, so
    that a tenant whose job does not fit does not hold up all others. From one decision to the next the first jobs
    are kept in order, and only those of tenants whose queue or share has changed are put in anew."""

    def __init__(self) -> None:
        self._of: tuple[JobQueue, RunningTable, tuple[float, float]] | None = None
        self._seen: dict[str, _TenantState] = {}
        self._entries: list[_Entry] = []
        self._until: tuple[float | str, ...] = ()  # every entry before this one is in the list
        self._read_last = (
            0  # entries that the last decision read, nearly: many tenants may be at their limits
        )
        self._weights: tuple[Mapping[str, TenantQuota], dict[str, float]] = {}, {}

    def __call__(self, snapshot: Snapshot) -> Iterator[WaitingRow]:
        waiting, running, total = snapshot.waiting, table_of(snapshot.running), snapshot.free.capacity
        if self._weights[0] is not snapshot.quotas:
            found_weights = {name: max(quota.weight, 1e-9) for name, quota in snapshot.quotas.items()}
            self._weights = snapshot.quotas, found_weights
        weights = self._weights[1]
        if isinstance(waiting, JobQueue):
            of = waiting, running, total
            if self._of is None or any(one is not other for one, other in zip(self._of, of, strict=True)):
                self._of, self._seen, self._entries, self._until = of, {}, [], ()
            self._update(waiting, running, weights)
            return self._read(waiting)
        found = []
        for name, rows in tenant_rows(waiting).items():
            state = 0, running.milli.get(name, 0), running.cpu_milli.get(name, 0), weights.get(name, 1.0)
            found.append(_by_share(name, state, rows, total))
        return (entry[-1] for entry in heapq.merge(*found))

    def _update(self, queue: JobQueue, running: RunningTable, weights: dict[str, float]) -> None:
        milli, cpu = running.milli, running.cpu_milli
        now = {
            name: (own.version, milli.get(name, 0), cpu.get(name, 0), weights.get(name, 1.0))
            for name, own in queue.by_tenant.items()
        }
        seen, self._seen = self._seen, now
        changed = {name for name, state in now.items() if seen.get(name) != state}
        changed |= seen.keys() - now.keys()
        if not changed:
            return
        entries = [entry for entry in self._entries if entry[2] not in changed]
        for name in changed & now.keys():
            for entry in self._tenant(name, queue):
                if entry >= self._until:
                    break
                bisect.insort(entries, entry)
        kept = max(_KEPT, self._read_last)
        if len(entries) > kept + _MORE_KEPT:
            del entries[kept:]
            self._until = entries[-1][:-1]
        self._entries = entries

    def _read(self, queue: JobQueue) -> Iterator[WaitingRow]:
        at = self._read_last = 0
        while True:
            some = self._entries[at:]
            for start in range(0, len(some), _STRETCH):
                self._read_last = at + start
                yield from map(_row_of, some[start : start + _STRETCH])
            at += len(some)
            if self._until == _EVERYTHING:
                return
            many = max(_KEPT, 2 * at)
            every = heapq.merge(*(self._tenant(name, queue) for name in self._seen))
            self._entries = list(itertools.islice(every, many))
            self._until = self._entries[-1][:-1] if len(self._entries) == many else _EVERYTHING

    def _tenant(self, name: str, queue: JobQueue) -> Iterator["_Entry"]:
        assert self._of is not None
        return _by_share(name, self._seen[name], queue.by_tenant[name].rows(), self._of[2])


_TenantState = tuple[int, int, int, float]  # version of its queue; thousandths of GPUs and of cores; weight
_Entry = tuple[float, float, str, int, WaitingRow]  # share, arrival, tenant, and the number among its jobs
_row_of = operator.itemgetter(4)
_EVERYTHING = (float("inf"),)
_KEPT, _MORE_KEPT, _STRETCH = 300, 100, 64  # entries


def _by_share(
    tenant: str, state: _TenantState, rows: Iterator[WaitingRow], total: tuple[float, float]
) -> Iterator[_Entry]:
    """The jobs of a tenant, each with the share that the tenant has before it."""
    _, milli, cpu_milli, weight = state
    gpus, cpu = milli / WHOLE_GPU, float(cpu_milli)
    for number, row in enumerate(rows):
        yield max(gpus / total[0], cpu / total[1]) / weight, row[0].arrival_s, tenant, number, row
        gpus += row[3]
        cpu += row[4]


def fair(place: Placer) -> Policy:
    """`ShareOrder` with backfill, and reclaiming: a tenant below its quota gets back what others borrowed, the
    youngest borrower first, because it loses least."""
    fill = queue_policy(ShareOrder(), place, backfill=True, reason="its tenant has the least", by_tenant=True)

    def policy(snapshot: Snapshot) -> list[Decision]:
        reclaimed: list[Decision] = []
        if snapshot.quotas:
            watch_running(snapshot, _tenant)
            reclaimed = _reclaim(
                snapshot, place, tenant_uses(snapshot, preemptible_on_nodes(snapshot, _tenant))
            )
        return reclaimed or fill(snapshot)

    return policy


def _reclaim(snapshot: Snapshot, place: Placer, uses: TenantUses) -> list[Decision]:
    queues = tenant_queues(snapshot.waiting)
    first = heapq.merge(*(queues[name] for name in uses.below_among(queues)), key=lambda job: job.arrival_s)
    tried: set[tuple[str, Shape]] = set()
    for job in itertools.islice(first, _MOST_TRIED):
        if job.gpus > -uses.over(job.tenant) + 1e-9 or (job.tenant, shape_key(job)) in tried:
            continue
        tried.add((job.tenant, shape_key(job)))
        if fits(job, snapshot.free, place):
            return []  # it fits without
        found = _borrowers(job, snapshot, uses).find()
        places = None if found is None else place(job, found[1])
        if found is None or places is None:
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
