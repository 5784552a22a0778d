"""A long queue of tenants with quotas: who is refused, and who is next. Tenants at their limits may have thousands
of jobs before the first that may start; a decision looks only at tenants whose jobs or GPUs have changed.
"""

import bisect
import heapq
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from cumulo.cluster.decide.decisions import Waits
from cumulo.cluster.decide.jobs import RunningJob
from cumulo.cluster.decide.queue import JobQueue, SortKey, WaitingRow
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.running import RunningTable, RunningView
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota

_ANY = float("inf")
_Entry = tuple[Any, int]  # the key of a job in the queue, and its number: its place
_Candidate = tuple[_Entry, str, WaitingRow]


class _ChangedTenants(RunningView):
    """Those whose jobs started or ended, in that order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, job: RunningJob) -> None:
        self.names.append(job.request.tenant)

    def remove(self, job: RunningJob) -> None:
        self.names.append(job.request.tenant)

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        pass  # it keeps its places


class QuotaLines:
    """Of each tenant: its first job that its quota allows, and those before it that are told why they wait: the
    first, and each that asks for less than all that were told before."""

    def __init__(
        self, queue: JobQueue, running: RunningTable, quotas: Mapping[str, TenantQuota], key: SortKey
    ) -> None:
        self.of, self.queue, self.key = (queue, running, quotas), queue, key
        self._changed = running.view(_ChangedTenants, _ChangedTenants)
        self._seen = len(queue.touched), len(self._changed.names)
        self._entries: list[_Entry] = []  # of all that are told, in order
        self._told: list[Waits] = []  # the same
        self._candidates: list[_Candidate] = []  # in order
        self._of_tenant: dict[str, tuple[list[_Entry], _Candidate | None, float]] = {}
        self._fresh = set(queue.lines(key))

    def update(self, book: QuotaBook) -> None:
        queue = self.queue
        seen, self._seen = self._seen, (len(queue.touched), len(self._changed.names))
        changed = {*queue.touched[seen[0] :], *self._changed.names[seen[1] :], *self._fresh}
        self._fresh = set()
        lines = queue.lines(self.key)
        for tenant in changed:
            self._forget(tenant)
            if tenant in lines:
                told, candidate, least = self._first(tenant, 0, _ANY, book)
                self._of_tenant[tenant] = [entry for entry, _ in told], candidate, least
                for entry, waits in told:
                    at = bisect.bisect(self._entries, entry)
                    self._entries.insert(at, entry)
                    self._told.insert(at, waits)
                if candidate is not None:
                    bisect.insort(self._candidates, candidate)

    def _forget(self, tenant: str) -> None:
        entries, candidate, _ = self._of_tenant.pop(tenant, ((), None, _ANY))
        for entry in entries:
            at = bisect.bisect_left(self._entries, entry)
            del self._entries[at], self._told[at]
        if candidate is not None:
            del self._candidates[bisect.bisect_left(self._candidates, candidate[:1])]

    def _first(
        self, tenant: str, at: int, least: float, book: QuotaBook
    ) -> tuple[list[tuple[_Entry, Waits]], _Candidate | None, float]:
        """The first job of a tenant from this number on that may start, and those that are told before it.
        `least`: the fewest GPUs that were refused."""
        queue = self.queue
        line, smallest = queue.lines(self.key)[tenant], 0 if queue.sharing else 1
        told: list[tuple[_Entry, Waits]] = []
        for number, row in enumerate(line.rows(at), at):
            if row[3] >= least:
                continue
            refused = book.refuses(row[0])
            if refused is None:
                return told, (line.keys[number], tenant, row), least
            told.append((line.keys[number], Waits(row[0].job_id, refused)))
            least = row[3]
            if least <= smallest:
                break  # nobody asks for less
        return told, None, least

    def in_turn(self, book: QuotaBook) -> Iterator[tuple[list[Waits], _Candidate | None]]:
        """Those that are told, and the job that is next; None: nobody else may start. Whoever asks for another has
        started that job, and counted it."""
        at, number = 0, 0
        told_more: list[tuple[_Entry, Waits]] = []  # of tenants that got another job in this decision
        more: list[_Candidate] = []  # theirs
        least_of: dict[str, float] = {}
        while True:
            candidate = self._candidates[number] if number < len(self._candidates) else None
            if more and (candidate is None or more[0] < candidate):
                candidate = heapq.heappop(more)
            elif candidate is not None:
                number += 1
            until = len(self._told) if candidate is None else bisect.bisect(self._entries, candidate[0])
            told = self._told[at:until]
            if told_more:
                some = [one for one in told_more if candidate is None or one[0] < candidate[0]]
                told_more = told_more[len(some) :]
                some += zip(self._entries[at:until], told, strict=True)
                told = [waits for _, waits in sorted(some, key=operator.itemgetter(0))]
            at = until
            yield told, candidate
            if candidate is None:
                return
            entry, tenant, _ = candidate
            behind = bisect.bisect(self.queue.lines(self.key)[tenant].keys, entry)
            least = least_of.get(tenant, self._of_tenant[tenant][2])
            found, following, least_of[tenant] = self._first(tenant, behind, least, book)
            told_more = sorted(told_more + found, key=operator.itemgetter(0))
            if following is not None:
                heapq.heappush(more, following)


def quota_lines(last: QuotaLines | None, snapshot: Snapshot, key: SortKey) -> QuotaLines | None:
    """Those of the last decision, if they can be kept; None: there is no such queue."""
    queue, running = snapshot.waiting, snapshot.running
    if not isinstance(queue, JobQueue) or not isinstance(running, RunningTable):
        return None
    of = queue, running, snapshot.quotas
    if last is None or any(one is not other for one, other in zip(last.of, of, strict=True)):
        return QuotaLines(queue, running, snapshot.quotas, key)
    return last
