"""The waiting jobs that quotas guarantee: those of tenants that have less than their quotas. `fair` reclaims for
them, the first to arrive first. From one decision to the next the first job of each such tenant is kept in order.
"""

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.queue import JobQueue, tenant_queues
from cumulo.cluster.decide.quotas import TenantUses
from cumulo.cluster.decide.running import table_of, touched_tenants
from cumulo.cluster.decide.snapshot import Snapshot

_Head = tuple[float, int, str]  # arrival of a tenant's first job, the number of its quota, and its name


class GuaranteedJobs:
    """In the order of arrival; of jobs that arrived together, in that of the quotas."""

    def __init__(self) -> None:
        self._of: tuple[JobQueue, TenantUses] | None = None
        self._heads: list[_Head] = []  # in order
        self._head_of: dict[str, _Head] = {}
        self._seen = 0, 0  # so many changes of the queue, and of what runs, are known

    def in_order(self, snapshot: Snapshot, uses: TenantUses) -> Iterator[JobRequest]:
        queue = snapshot.waiting
        if not isinstance(queue, JobQueue):
            queues = tenant_queues(queue)
            heads = [_head(name, queues[name], uses) for name in uses.below & queues.keys()]
            return _merged(sorted(heads), queues.__getitem__)
        self._update(queue, uses, touched_tenants(table_of(snapshot.running)))
        lines = queue.by_tenant
        return _merged(self._heads, lambda name: lines[name].jobs)

    def _update(self, queue: JobQueue, uses: TenantUses, started: list[str]) -> None:
        touched, lines = queue.touched, queue.by_tenant
        if self._of is None or self._of[0] is not queue or self._of[1] is not uses:
            self._of, self._heads, self._head_of = (queue, uses), [], {}
            changed = set(lines)
        else:
            changed = {*touched[self._seen[0] :], *started[self._seen[1] :]}
        self._seen = len(touched), len(started)
        for name in changed:
            known, line = self._head_of.pop(name, None), lines.get(name)
            if known is not None:
                del self._heads[bisect.bisect_left(self._heads, known)]
            if line is not None and name in uses.below:
                head = self._head_of[name] = _head(name, line.jobs, uses)
                bisect.insort(self._heads, head)


def _head(tenant: str, jobs: Sequence[JobRequest], uses: TenantUses) -> _Head:
    return jobs[0].arrival_s, uses.order[tenant], tenant


def _merged(heads: Sequence[_Head], jobs_of: Callable[[str], Sequence[JobRequest]]) -> Iterator[JobRequest]:
    """All jobs of these tenants, and a tenant costs nothing before its first job is due."""
    # Arrival, number of the quota, number among the tenant's jobs, and these.
    due: list[tuple[float, int, int, Sequence[JobRequest]]] = []
    at = 0
    while due or at < len(heads):
        if not due or (at < len(heads) and heads[at][:2] < due[0][:2]):
            (_, order, name), number = heads[at], 0
            jobs, at = jobs_of(name), at + 1
        else:
            _, order, number, jobs = heapq.heappop(due)
        yield jobs[number]
        if number + 1 < len(jobs):
            heapq.heappush(due, (jobs[number + 1].arrival_s, order, number + 1, jobs))
