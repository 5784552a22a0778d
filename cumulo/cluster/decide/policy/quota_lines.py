"""A long queue of tenants with quotas: who is refused, and who is next. Tenants at their limits may have thousands
of jobs before the first that may start; a decision looks only at tenants whose jobs or GPUs have changed.
"""

import bisect
import heapq
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
_First = tuple[Entry, float, JobRequest]  # the first job of a size, and its GPUs
_entry = operator.itemgetter(0)


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
    a look at the thousand larger jobs before it. It is to be `complete` before anybody asks."""

    def __init__(self, key: SortKey, jobs: Iterable[tuple[int, JobRequest]]) -> None:
        self._key = key
        self._of: dict[str, dict[float, list[tuple[Entry, JobRequest]]]] = {}
        self._unread = {job.job_id: (number, job) for number, job in jobs}

    def complete(self, at_most: int | None = None) -> bool:
        """Whether all jobs are in it, after another so many of a long queue."""
        unread = self._unread
        for name in list(itertools.islice(unread, at_most)):
            number, job = unread.pop(name)
            self.add(job, number)
        return not unread

    @property
    def tenants(self) -> Collection[str]:
        return self._of.keys()

    def add(self, job: JobRequest, number: int) -> None:
        same = self._of.setdefault(job.tenant, {}).setdefault(job.gpus, [])
        bisect.insort(same, ((self._key(job), number), job))

    def remove(self, job: JobRequest, number: int) -> None:
        if self._unread.pop(job.job_id, None) is not None:
            return
        sizes = self._of[job.tenant]
        same = sizes[job.gpus]
        del same[bisect.bisect_left(same, ((self._key(job), number),))]
        if not same:
            del sizes[job.gpus]

    def first_of_each(self, tenant: str) -> list[_First]:
        """In order: the first job of each size."""
        found = [(same[0][0], gpus, same[0][1]) for gpus, same in self._of.get(tenant, {}).items()]
        found.sort()  # no two entries are equal
        return found

    def behind(self, tenant: str, first: _First) -> list[_First]:
        """The next of its size, if there is one."""
        entry, gpus, _ = first
        same = self._of[tenant][gpus]
        at = bisect.bisect(same, entry, key=_entry)
        return [(same[at][0], gpus, same[at][1])] if at < len(same) else []


@dataclass(slots=True)
class _Line:
    """Of one tenant: who is told, and who is next."""

    told: _Told
    candidate: _Candidate | None
    least: float  # GPUs that were refused
    # In order, and the candidate is the first: the first jobs of each size, without those that are refused.
    firsts: list[_First]


_NO_LINE = _Line([], None, _ANY, [])


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
        self._of_tenant: dict[str, _Line] = {}
        self._begun = False  # every tenant's jobs were looked at

    def complete(self, at_most: int) -> bool:
        """Whether they can be asked for at once: a long queue is read in parts."""
        return self._sizes.complete(at_most)

    def update(self, book: QuotaBook) -> None:
        queue, started = self.queue, self._started
        seen, self._seen = self._seen, (len(queue.touched), len(started))
        if self._begun:
            changed = {*queue.touched[seen[0] :], *started[seen[1] :]}
        else:
            self._sizes.complete()
            self._begun, changed = True, set(self._sizes.tenants)
        for tenant in changed:
            old = self._of_tenant.get(tenant, _NO_LINE)
            line = self._first(tenant, self._sizes.first_of_each(tenant), _ANY, book)
            self._of_tenant[tenant] = line
            if line.told != old.told:
                self._tell(old.told, line.told)
            if old.candidate is not None:
                del self._candidates[bisect.bisect_left(self._candidates, old.candidate[:1])]
            if line.candidate is not None:
                bisect.insort(self._candidates, line.candidate)

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

    def _first(self, tenant: str, firsts: list[_First], least: float, book: QuotaBook) -> _Line:
        """Of these jobs. `least`: the fewest GPUs that were refused."""
        told: _Told = []
        place_of = self.lines.places(tenant) if firsts else _same
        for at, (entry, gpus, job) in enumerate(firsts):
            if gpus < least and gpus <= book.most_gpus:
                refused = book.refuses(job, gpus)
                if refused is None:
                    candidate = place_of(entry), tenant, self.queue.row(job), entry
                    return _Line(told, candidate, least, firsts[at:])
                told.append((place_of(entry), Waits(job.job_id, refused)))
                least = gpus
        return _Line(told, None, least, [])

    def _following(self, tenant: str, line: _Line, book: QuotaBook) -> _Line:
        """After its candidate has started."""
        firsts = line.firsts[1:]
        for one in self._sizes.behind(tenant, line.firsts[0]):
            bisect.insort(firsts, one)
        return self._first(tenant, firsts, line.least, book)

    def in_turn(self, book: QuotaBook) -> Iterator[tuple[list[Waits], _Candidate | None]]:
        """Those that are told, and the job that is next; None: nobody else may start. Whoever asks for another has
        started that job, and counted it."""
        at, number = 0, 0
        told_more: _Told = []  # of tenants that got another job in this decision
        more: list[_Candidate] = []  # theirs
        line_of: dict[str, _Line] = {}
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
                told = [waits for _, waits in sorted(some, key=_entry)]
            at = until
            yield told, candidate
            if candidate is None:
                return
            tenant = candidate[1]
            line = self._following(tenant, line_of.get(tenant) or self._of_tenant[tenant], book)
            line_of[tenant] = line
            if line.told:
                told_more = sorted(told_more + line.told, key=_entry)
            if line.candidate is not None:
                heapq.heappush(more, line.candidate)


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
