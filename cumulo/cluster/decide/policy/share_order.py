"""Waiting jobs in the order of fair shares (DRF, Ghodsi et al., NSDI 2011): `fair` reads them. From one decision
to the next each tenant's first job and, where somebody reads further, the first jobs of all are kept in order; only
those of tenants whose queue or share has changed are put in anew.
"""

import bisect
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cumulo.cluster.decide.policy.orders import PassedOver, SkippingRows
from cumulo.cluster.decide.policy.quota_lines import Entry, Place, TenantLines
from cumulo.cluster.decide.policy.share_merge import FirstInColumns, RestOfLine, ShareEntry, by_share, merged
from cumulo.cluster.decide.queue import JobQueue, SortedJobs, WaitingRow, by_arrival_key, tenant_rows
from cumulo.cluster.decide.running import RunningTable, table_of, touched_tenants
from cumulo.cluster.decide.shapes import GangShape
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota

_Head = tuple[float, float, str]  # share, arrival and tenant of a tenant's first job
_row_of = operator.itemgetter(4)
_EVERYTHING = (float("inf"),)
_MANY_TENANTS, _FEW_MORE = 64, 400  # tenants, and jobs that are faster merged in order than counted
_KEPT, _MORE_KEPT, _FEWEST_KEPT, _STRETCH = 260, 50, 205, 64  # entries, where nobody reads further
_MOST_LISTED = 512  # more entries in one decision: who reads further does so in the next ones


class _Source(NamedTuple):
    """What an order is of."""

    queue: JobQueue | None
    running: RunningTable
    total: tuple[float, float]  # thousandths of GPUs and of cores
    quotas: Mapping[str, TenantQuota]

    def weight(self, tenant: str) -> float:
        quota = self.quotas.get(tenant)
        return 1.0 if quota is None else max(quota.weight, 1e-9)

    def has(self, tenant: str) -> tuple[int, int]:
        """Thousandths of GPUs and of cores of its running jobs."""
        return self.running.milli.get(tenant, 0), self.running.cpu_milli.get(tenant, 0)

    def share(self, tenant: str) -> float:
        """Its weighted dominant share."""
        milli, cpu_milli = self.has(tenant)
        return max(milli / self.total[0], cpu_milli / self.total[1]) / self.weight(tenant)

    def entries(self, tenant: str, rows: Iterator[WaitingRow]) -> Iterator[ShareEntry]:
        """The waiting jobs of a tenant."""
        return by_share(tenant, self.weight(tenant), self.total, *self.has(tenant), rows)


@dataclass(slots=True)
class _Tenant:
    """What is known about a tenant's jobs in the kept order."""

    name: str
    weight: float
    queue: SortedJobs
    has: tuple[int, int]  # thousandths of GPUs and of cores of its running jobs
    version: int  # of its queue
    kept: int = 0  # so many of its jobs are in the kept order: its first
    milli: int = 0  # of GPUs that it has with these jobs
    cpu_milli: int = 0
    whole: bool = False  # these were all its jobs

    @classmethod
    def unknown(cls, name: str, of: _Source, queue: SortedJobs) -> "_Tenant":
        """None of its jobs is kept."""
        has = of.has(name)
        return cls(name, of.weight(name), queue, has, queue.version, 0, *has)

    def count_again(self, kept: int) -> None:
        """Only so many of its jobs are kept."""
        self.kept, self.whole = kept, False
        self.milli, self.cpu_milli = self.has
        for row in itertools.islice(self.queue.rows(), kept):
            self.milli += row[1].milli
            self.cpu_milli += row[4]


class _SharePlaces:
    """Of one tenant's jobs, from its first to its last."""

    def __init__(self, of: _Source, tenant: str, own: SortedJobs) -> None:
        self._total, self._tenant, self._weight, self._own = of.total, tenant, of.weight(tenant), own
        self._has, self._number = of.has(tenant), 0

    def __call__(self, entry: Entry) -> Place:
        number = self._number = bisect.bisect_left(self._own.keys, entry, self._number)
        milli, cpu_milli = self._own.asked_before(number)
        milli, cpu_milli = self._has[0] + milli, self._has[1] + cpu_milli
        share = max(milli / self._total[0], cpu_milli / self._total[1]) / self._weight
        return share, entry[0], self._tenant, number


class _ShareRows(SkippingRows):
    """All waiting jobs, from the one of this number on."""

    def __init__(self, order: "ShareOrder", rows: Iterator[WaitingRow], first: int, now_s: float) -> None:
        self._order, self._rows, self._now_s = order, rows, now_s
        self._next = first

    def __next__(self) -> WaitingRow:
        row = next(self._rows)
        self._next += 1
        return row

    def besides(self, at_most: int, passed: PassedOver) -> Iterator[WaitingRow]:
        return self._order.rows_besides(self._next, at_most, passed, self._rows, self._now_s)


class ShareOrder(TenantLines):
    """Jobs one by one from the tenant with the smallest weighted dominant share; what is tried counts as had, so
    that a tenant whose job does not fit does not hold up all others."""

    key = staticmethod(by_arrival_key)

    def __init__(self) -> None:
        self._of: _Source | None = None
        self._heads: list[_Head] = []  # in order
        self._head_of: dict[str, _Head] = {}
        self._heads_seen = self._seen = 0, 0  # so many changes of the queue, and of what runs, are known
        self._tenants: dict[str, _Tenant] = {}
        self._read_on = False  # the last decision looked at more than the first job
        self._entries: list[ShareEntry] = []
        self._until: Place = ()  # every entry before this one is in the list
        self._most = _KEPT  # entries that are kept: somewhat more than were read of late
        self._now_s = 0.0

    def __call__(self, snapshot: Snapshot) -> Iterator[WaitingRow]:
        if isinstance(snapshot.waiting, JobQueue):
            of = self._begin(snapshot, snapshot.waiting)
            rows = itertools.chain.from_iterable(self._from_first(of, snapshot.waiting))
            return _ShareRows(self, rows, 0, snapshot.now_s)
        of = _Source(None, table_of(snapshot.running), snapshot.free.capacity, snapshot.quotas)
        parts = [of.entries(name, rows) for name, rows in tenant_rows(snapshot.waiting).items()]
        return map(_row_of, heapq.merge(*parts))

    def _from_first(self, of: _Source, queue: JobQueue) -> Iterator[Iterable[WaitingRow]]:
        """Where a decision looks at the first job only, as the last one did, the others are not put in order."""
        if self._read_on or not len(queue):
            self._put_in_order(of, queue)
            self._read_on = False
            yield map(_row_of, self._entries[:1])
        else:
            self._update_heads(of, queue)
            yield itertools.islice(queue.by_tenant[self._heads[0][2]].rows(), 1)
        self._put_in_order(of, queue)
        yield from self._stretches(1)

    def _put_in_order(self, of: _Source, queue: JobQueue) -> None:
        self._read_on = True
        self._update(of, queue)
        if len(self._entries) < _FEWEST_KEPT and self._until != _EVERYTHING:
            self._fill()

    def rows_besides(
        self, first: int, at_most: int, passed: PassedOver, rows: Iterator[WaitingRow], now_s: float
    ) -> Iterator[WaitingRow]:
        """As `SkippingRows` has them, from the job of this number on; `rows`: all of these."""
        assert self._of is not None and self._of.queue is not None
        self._put_in_order(self._of, self._of.queue)
        many = bool(self._of.quotas) or len(self._tenants) > _MANY_TENANTS
        if many:
            self._keep(first + at_most)
        kept, failed = len(self._entries) - first, passed.failed
        if kept < 0 or (at_most < kept + _FEW_MORE and not many):
            yield from [row for row in itertools.islice(rows, at_most) if row[1] not in failed]
            return
        yield from [row for _, _, _, _, row in self._entries[first : first + at_most] if row[1] not in failed]
        if not many and at_most > kept and self._until != _EVERYTHING:
            rests = [self._rest(one) for one in self._tenants.values()]
            yield from _needed(FirstInColumns(rests, at_most - kept, now_s), passed, self._of.queue)

    def _update_heads(self, of: _Source, queue: JobQueue) -> None:
        touched, started = queue.touched, touched_tenants(of.running)
        seen, self._heads_seen = self._heads_seen, (len(touched), len(started))
        queues, heads, head_of = queue.by_tenant, self._heads, self._head_of
        for name in {*touched[seen[0] :], *started[seen[1] :]}:
            known, own = head_of.pop(name, None), queues.get(name)
            if known is not None:
                del heads[bisect.bisect_left(heads, known)]
            if own is not None:
                head = head_of[name] = of.share(name), own.jobs[0].arrival_s, name
                bisect.insort(heads, head)

    def lines(self, snapshot: Snapshot, queue: JobQueue) -> TenantLines:
        self._begin(snapshot, queue)
        self._now_s = snapshot.now_s
        return self

    def places(self, tenant: str) -> Callable[[Entry], Place]:
        assert self._of is not None and self._of.queue is not None
        return _SharePlaces(self._of, tenant, self._of.queue.by_tenant[tenant])

    def rows_behind(self, place: Place) -> Iterator[WaitingRow]:
        assert self._of is not None and self._of.queue is not None
        self._put_in_order(self._of, self._of.queue)
        at = bisect.bisect_left(self._entries, place)
        if at < len(self._entries):
            at += self._entries[at][:4] == place
            return _ShareRows(self, self._rows(at), at, self._now_s)
        return map(_row_of, itertools.chain.from_iterable(self._merged(place)))

    def _begin(self, snapshot: Snapshot, queue: JobQueue) -> _Source:
        """What is kept is forgotten if it is of another queue or cluster."""
        of = _Source(queue, table_of(snapshot.running), snapshot.free.capacity, snapshot.quotas)
        if self._of is not None and all(one is other for one, other in zip(self._of, of, strict=True)):
            return self._of
        self._of, self._tenants, self._entries, self._until = of, {}, [], ()
        self._heads, self._head_of = [], {}
        self._heads_seen = self._seen = 0, len(touched_tenants(of.running))
        return of

    def _update(self, of: _Source, queue: JobQueue) -> None:
        """Puts the jobs of tenants in anew whose queue or share has changed."""
        touched, started = queue.touched, touched_tenants(of.running)
        seen, self._seen = self._seen, (len(touched), len(started))
        if self._seen == seen:
            return
        queues, tenants = queue.by_tenant, self._tenants
        old, fresh = set[str](), list[ShareEntry]()
        for name in {*touched[seen[0] :], *started[seen[1] :]}:
            known, own = tenants.get(name), queues.get(name)
            if own is None:
                if known is not None:
                    old.add(name)
                    del tenants[name]
                continue
            has = of.has(name)
            if known is not None:
                same = known.version == own.version and known.has == has
                if same and (not known.whole or known.kept == len(own.jobs)):
                    continue  # others joined behind those in the list
                old.add(name)
            tenants[name] = _Tenant.unknown(name, of, own)
            self._list(tenants[name], of.total, fresh)
            if len(fresh) > 2 * self._most:  # as when many arrived at once
                self._entries, self._until = [], ()
                self._tenants = {one: _Tenant.unknown(one, of, line) for one, line in queues.items()}
                return
        entries = self._entries
        if len(old) == 1:
            (one,) = old
            entries = [entry for entry in entries if entry[2] != one]
        elif old:
            entries = [entry for entry in entries if entry[2] not in old]
        if fresh:
            entries += fresh
            entries.sort()
        self._entries = entries
        if len(entries) > self._most + _MORE_KEPT:
            self._shorten()

    def _list(self, tenant: _Tenant, total: tuple[float, float], fresh: list[ShareEntry]) -> None:
        """Those of its jobs that are before the end of the kept order."""
        name, weight, until, (total_milli, total_cpu) = tenant.name, tenant.weight, self._until, total
        number, (milli, cpu) = 0, tenant.has
        last = until[0] if until else -1.0
        tenant.whole = True
        for row in tenant.queue.rows():
            by_gpus, by_cpu = milli / total_milli, cpu / total_cpu
            share = (by_gpus if by_gpus >= by_cpu else by_cpu) / weight
            arrival_s = row[0].arrival_s
            if share >= last and (share, arrival_s, name, number) >= until:
                tenant.whole = False
                break
            fresh.append((share, arrival_s, name, number, row))
            milli += row[1].milli
            cpu += row[4]
            number += 1
        tenant.kept, tenant.milli, tenant.cpu_milli = number, milli, cpu

    def _shorten(self) -> None:
        left_out = self._entries[self._most :]
        del self._entries[self._most :]
        self._until = self._entries[-1][:-1]
        for name, kept in {entry[2]: entry[3] for entry in reversed(left_out)}.items():
            self._tenants[name].count_again(kept)

    def _keep(self, many: int) -> None:
        """So many, if there are so many, or it comes nearer to that. The list becomes shorter again when fewer are
        read for some time."""
        self._most = max(many + many // 4, _KEPT, self._most - _MORE_KEPT)
        if len(self._entries) < many and self._until != _EVERYTHING:
            self._fill()

    def _fill(self) -> None:
        """Lists more jobs."""
        missing = min(self._most - len(self._entries), _MOST_LISTED)
        more = list(itertools.islice(itertools.chain.from_iterable(self._merged()), missing))
        for _, _, name, _, row in more:
            tenant = self._tenants[name]
            tenant.kept += 1
            tenant.milli += row[1].milli
            tenant.cpu_milli += row[4]
            tenant.whole = tenant.kept == len(tenant.queue.jobs)
        self._entries += more
        self._until = self._entries[-1][:-1] if len(more) == missing else _EVERYTHING

    def _rest(self, tenant: _Tenant, behind: Place = ()) -> RestOfLine:
        """The jobs of a tenant that are not in the kept order; and behind this place."""
        assert self._of is not None
        number, milli, cpu, total = tenant.kept, tenant.milli, tenant.cpu_milli, self._of.total
        if behind:
            # Jobs that are clearly before it cost no entry each.
            share = behind[0] * tenant.weight * (1 - 1e-9)
            few_milli, few_cpu = share * total[0], share * total[1]
            for row in tenant.queue.rows(number):
                clearly = milli < few_milli and cpu < few_cpu
                if not clearly:
                    own = max(milli / total[0], cpu / total[1]) / tenant.weight
                    if (own, row[0].arrival_s, tenant.name, number) > behind:
                        break
                milli += row[1].milli
                cpu += row[4]
                number += 1
        return RestOfLine(tenant.name, tenant.weight, total, number, milli, cpu, tenant.queue)

    def _merged(self, behind: Place = ()) -> Iterator[list[ShareEntry]]:
        """All jobs that are not in the kept order; and behind this place."""
        return merged([self._rest(one, behind) for one in self._tenants.values()], self._distance())

    def _distance(self) -> float:
        """How far the shares of neighbours are apart, about."""
        entries = self._entries
        return (entries[-1][0] - entries[0][0]) / len(entries) if entries else 0.0

    def _rows(self, at: int) -> Iterator[WaitingRow]:
        """From the kept entry of this number on."""
        return itertools.chain.from_iterable(self._stretches(at))

    def _stretches(self, at: int) -> Iterator[Iterable[WaitingRow]]:
        for start in range(at, len(self._entries), _STRETCH):
            yield map(_row_of, self._entries[start : start + _STRETCH])
        if self._until != _EVERYTHING:
            for some in self._merged():
                yield map(_row_of, some)


def _needed(jobs: FirstInColumns, passed: PassedOver, queue: JobQueue) -> Iterator[WaitingRow]:
    """Those that are not passed over when it is their turn."""
    failed, at = passed.failed, 0
    harmful: Mapping[GangShape, float] = {}
    changed: Iterable[GangShape] = failed
    latest_s = np.full(queue.shapes_seen, math.inf)
    while True:
        if harmful is not passed.harmful:
            changed = [*changed, *harmful, *passed.harmful]
            harmful = passed.harmful
        for shape in changed:
            latest_s[shape.number] = -math.inf if shape in failed else harmful.get(shape, math.inf)
        found = jobs.next_one(at, latest_s)
        if found is None:
            return
        row = jobs.row(found)
        yield row
        at, changed = found + 1, (row[1],)
