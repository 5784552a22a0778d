"""A long queue of tenants with quotas: who is refused, and who is next. Tenants at their limits may have thousands
of jobs before the first that may start; a decision looks only at tenants whose jobs or GPUs have changed.
"""

import bisect
import heapq
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cumulo.cluster.decide.decisions import Waits
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.queue import JobQueue, QueueView, SortKey, WaitingRow
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.running import RunningTable, touched_tenants
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota

_ANY = float("inf")
Place = tuple[Any, ...]  # of a job among all that wait: those with smaller ones are before it
Entry = tuple[Any, int]  # the key of a job among those of its tenant, and its number
_Candidate = tuple[Place, str, WaitingRow, Entry]
_Told = list[tuple[Place, Waits]]


class TenantLines(Protocol):
    """The waiting jobs in the order of a policy."""

    @property
    def key(self) -> SortKey:
        """The order of a tenant's own jobs."""

    def places(self, tenant: str) -> Callable[[Entry], Place]:
        """The places of its jobs among all waiting jobs; to be asked for from its first job to its last."""

    def rows_behind(self, place: Place) -> Iterator[WaitingRow]:
        """The jobs of all tenants behind this place."""


@dataclass(frozen=True, slots=True)
class KeyLines(TenantLines):
    """In the order of a key that a queue keeps."""

    queue: JobQueue
    key: SortKey

    def places(self, tenant: str) -> Callable[[Entry], Place]:
        return _same

    def rows_behind(self, place: Place) -> Iterator[WaitingRow]:
        return self.queue.rows_behind(self.key, (place[0], place[1]))


def _same(entry: Entry) -> Place:
    return entry


class JobsBySize(QueueView):
    """Each tenant's jobs by the GPUs that they ask for, in the order of a key: what a quota allows is found without
    a look at the thousand larger jobs before it."""

    def __init__(self, key: SortKey, jobs: Iterable[tuple[int, JobRequest]]) -> None:
        self._key = key
        self._of: dict[str, dict[float, list[tuple[Entry, JobRequest]]]] = {}
        for number, job in jobs:
            self.add(job, number)

    def add(self, job: JobRequest, number: int) -> None:
        same = self._of.setdefault(job.tenant, {}).setdefault(job.gpus, [])
        bisect.insort(same, ((self._key(job), number), job))

    def remove(self, job: JobRequest, number: int) -> None:
        sizes = self._of[job.tenant]
        same = sizes[job.gpus]
        del same[bisect.bisect_left(same, ((self._key(job), number),))]
        if not same:
            del sizes[job.gpus]

    def first_of_each(
        self, tenant: str, behind: Entry | None, below: float
    ) -> list[tuple[Entry, float, JobRequest]]:
        """In order: the first job of each size that asks for fewer GPUs; `behind`: and that is behind this one."""
        found: list[tuple[Entry, float, JobRequest]] = []
        for gpus, same in self._of.get(tenant, {}).items():
            if gpus < below:
                at = 0
                if behind is not None:
                    at = bisect.bisect_left(same, (behind,))
                    at += at < len(same) and same[at][0] == behind
                if at < len(same):
                    found.append((same[at][0], gpus, same[at][1]))
        found.sort()  # no two entries are equal
        return found


class QuotaLines:
    """Of each tenant: its first job that its quota allows, and those before it that are told why they wait: the
    first, and each that asks for less than all that were told before."""

    def __init__(
        self, queue: JobQueue, running: RunningTable, quotas: Mapping[str, TenantQuota], lines: TenantLines
    ) -> None:
        self.of, self.queue, self.lines = (queue, running, quotas), queue, lines
        key = lines.key
        self._sizes = queue.view((JobsBySize, key), lambda jobs: JobsBySize(key, jobs))
        self._started = touched_tenants(running)
        self._seen = len(queue.touched), len(self._started)
        self._entries: list[Place] = []  # of all that are told, in order
        self._told: list[Waits] = []  # the same
        self._candidates: list[_Candidate] = []  # in order
        self._of_tenant: dict[str, tuple[_Told, _Candidate | None, float]] = {}
        self._fresh = {job.tenant for job in queue}

    def update(self, book: QuotaBook) -> None:
        queue, started = self.queue, self._started
        seen, self._seen = self._seen, (len(queue.touched), len(started))
        changed = {*queue.touched[seen[0] :], *started[seen[1] :], *self._fresh}
        self._fresh = set()
        for tenant in changed:
            told, candidate, least = self._first(tenant, None, _ANY, book)
            old, last, _ = self._of_tenant.get(tenant, ((), None, _ANY))
            self._of_tenant[tenant] = told, candidate, least
            if told != old:
                self._tell(old, told)
            if last is not None:
                del self._candidates[bisect.bisect_left(self._candidates, last[:1])]
            if candidate is not None:
                bisect.insort(self._candidates, candidate)

    def _tell(self, old: Sequence[tuple[Place, Waits]], told: _Told) -> None:
        entries, every = self._entries, self._told
        if [place for place, _ in old] == [place for place, _ in told]:  # the same jobs, for other reasons
            for place, waits in told:
                every[bisect.bisect_left(entries, place)] = waits
            return
        for place, _ in old:
            at = bisect.bisect_left(entries, place)
            del entries[at], every[at]
        for place, waits in told:
            at = bisect.bisect_left(entries, place)
            entries.insert(at, place)
            every.insert(at, waits)

    def _first(
        self, tenant: str, behind: Entry | None, least: float, book: QuotaBook
    ) -> tuple[_Told, _Candidate | None, float]:
        """The first job of a tenant behind this one that may start, and those that are told before it. `least`: the
        fewest GPUs that were refused."""
        told: _Told = []
        some = self._sizes.first_of_each(tenant, behind, least)
        place_of = self.lines.places(tenant) if some else _same
        for entry, gpus, job in some:
            if gpus < least:
                refused = book.refuses(job, gpus)
                if refused is None:
                    return told, (place_of(entry), tenant, self.queue.row(job), entry), least
                told.append((place_of(entry), Waits(job.job_id, refused)))
                least = gpus
        return told, None, least

    def in_turn(self, book: QuotaBook) -> Iterator[tuple[list[Waits], _Candidate | None]]:
        """Those that are told, and the job that is next; None: nobody else may start. Whoever asks for another has
        started that job, and counted it."""
        at, number = 0, 0
        told_more: _Told = []  # of tenants that got another job in this decision
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
            _, tenant, _, entry = candidate
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
