"""A long queue of tenants with quotas: who is refused, and who is next. Tenants at their limits may have thousands
of jobs before the first that may start; a decision looks only at tenants whose jobs or GPUs have changed.
"""

import bisect
import heapq
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cumulo.cluster.decide.decisions import Waits
from cumulo.cluster.decide.queue import JobQueue, SortedJobs, SortKey, WaitingRow
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.running import RunningTable, touched_tenants
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota

_ANY = float("inf")
Place = tuple[Any, ...]  # of a job among all that wait: those with smaller ones are before it
_Candidate = tuple[Place, str, WaitingRow]


class TenantLine(Protocol):
    """The waiting jobs of a tenant, read from its start, or from behind a place."""

    def below(self, gpus: float) -> tuple[Place, WaitingRow] | None:
        """The next job that asks for fewer GPUs; None: there is none."""


class TenantLines(Protocol):
    """The waiting jobs of each tenant in the order of a policy, with their places among all waiting jobs."""

    def line(self, tenant: str, behind: Place | None) -> TenantLine | None:
        """None: none of its jobs waits."""

    def rows_behind(self, place: Place) -> Iterator[WaitingRow]:
        """The jobs of all tenants behind this place."""


class _KeyLine(TenantLine):
    def __init__(self, own: SortedJobs, at: int) -> None:
        self._keys, self._rows = own.keys, enumerate(own.rows(at), at)

    def below(self, gpus: float) -> tuple[Place, WaitingRow] | None:
        for number, row in self._rows:
            if row[3] < gpus:
                return self._keys[number], row
        return None


@dataclass(frozen=True, slots=True)
class KeyLines(TenantLines):
    """In the order of a key that a queue keeps."""

    queue: JobQueue
    key: SortKey

    def line(self, tenant: str, behind: Place | None) -> TenantLine | None:
        own = self.queue.lines(self.key).get(tenant)
        if own is None:
            return None
        return _KeyLine(own, 0 if behind is None else bisect.bisect(own.keys, behind))

    def rows_behind(self, place: Place) -> Iterator[WaitingRow]:
        return self.queue.rows_behind(self.key, place)


class QuotaLines:
    """Of each tenant: its first job that its quota allows, and those before it that are told why they wait: the
    first, and each that asks for less than all that were told before."""

    def __init__(
        self, queue: JobQueue, running: RunningTable, quotas: Mapping[str, TenantQuota], lines: TenantLines
    ) -> None:
        self.of, self.queue, self.lines = (queue, running, quotas), queue, lines
        self._started = touched_tenants(running)
        self._seen = len(queue.touched), len(self._started)
        self._entries: list[Place] = []  # of all that are told, in order
        self._told: list[Waits] = []  # the same
        self._candidates: list[_Candidate] = []  # in order
        self._of_tenant: dict[str, tuple[list[Place], _Candidate | None, float]] = {}
        self._fresh = {job.tenant for job in queue}

    def update(self, book: QuotaBook) -> None:
        queue, started = self.queue, self._started
        seen, self._seen = self._seen, (len(queue.touched), len(started))
        changed = {*queue.touched[seen[0] :], *started[seen[1] :], *self._fresh}
        self._fresh = set()
        for tenant in changed:
            self._forget(tenant)
            told, candidate, least = self._first(tenant, None, _ANY, book)
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
        self, tenant: str, behind: Place | None, least: float, book: QuotaBook
    ) -> tuple[list[tuple[Place, Waits]], _Candidate | None, float]:
        """The first job of a tenant behind this place that may start, and those that are told before it. `least`:
        the fewest GPUs that were refused."""
        fewest, told = self.queue.fewest_gpus(tenant), list[tuple[Place, Waits]]()
        line = self.lines.line(tenant, behind)
        while line is not None and least > fewest and (found := line.below(least)) is not None:
            entry, row = found
            refused = book.refuses(row[0], row[3])
            if refused is None:
                return told, (entry, tenant, row), least
            told.append((entry, Waits(row[0].job_id, refused)))
            least = row[3]
        return told, None, least

    def in_turn(self, book: QuotaBook) -> Iterator[tuple[list[Waits], _Candidate | None]]:
        """Those that are told, and the job that is next; None: nobody else may start. Whoever asks for another has
        started that job, and counted it."""
        at, number = 0, 0
        told_more: list[tuple[Place, Waits]] = []  # of tenants that got another job in this decision
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
            least = least_of.get(tenant, self._of_tenant[tenant][2])
            found, following, least_of[tenant] = self._first(tenant, entry, least, book)
            told_more = sorted(told_more + found, key=operator.itemgetter(0))
            if following is not None:
                heapq.heappush(more, following)


def quota_lines(
    last: QuotaLines | None, snapshot: Snapshot, lines: Callable[[Snapshot, JobQueue], TenantLines]
) -> QuotaLines | None:
    """Those of the last decision, if they can be kept; None: there is no such queue."""
    queue, running = snapshot.waiting, snapshot.running
    if not isinstance(queue, JobQueue) or not isinstance(running, RunningTable):
        return None
    of, now = (queue, running, snapshot.quotas), lines(snapshot, queue)
    if last is None or any(one is not other for one, other in zip(last.of, of, strict=True)):
        return QuotaLines(queue, running, snapshot.quotas, now)
    last.lines = now
    return last
