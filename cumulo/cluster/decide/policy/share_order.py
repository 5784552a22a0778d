"""Waiting jobs in the order of fair shares (DRF, Ghodsi et al., NSDI 2011): `fair` reads them. From one decision
to the next the first jobs are kept in order, and only those of tenants whose queue or share has changed are put in
anew.
"""

import heapq
import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cumulo.cluster.decide.jobs import WHOLE_GPU, RunningJob
from cumulo.cluster.decide.queue import JobQueue, SortedJobs, WaitingRow, tenant_rows
from cumulo.cluster.decide.running import RunningTable, RunningView, table_of
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota

_Entry = tuple[float, float, str, int, WaitingRow]  # share, arrival, tenant, and the number among its jobs
_row_of = operator.itemgetter(4)
_EVERYTHING = (float("inf"),)
_KEPT, _MORE_KEPT, _FEWEST_KEPT, _STRETCH = 260, 50, 205, 64  # entries
_ANY = float("inf")


@dataclass(slots=True)
class _Tenant:
    """What is known about a tenant's jobs in the kept order."""

    name: str
    weight: float
    queue: SortedJobs
    state: tuple[
        int, int, int
    ]  # version of its queue; thousandths of GPUs and of cores that its running jobs have
    kept: int = 0  # so many of its jobs are in the kept order: its first
    gpus: float = 0.0  # that it has with these jobs
    cpu_milli: float = 0.0
    whole: bool = False  # these were all its jobs

    def count_again(self, kept: int) -> None:
        """Only so many of its jobs are kept."""
        self.kept, self.whole = kept, False
        self.gpus, self.cpu_milli = self.state[1] / WHOLE_GPU, float(self.state[2])
        for row in itertools.islice(self.queue.rows(), kept):
            self.gpus += row[3]
            self.cpu_milli += row[4]


class _MovedTenants(RunningView):
    """Tenants of which a job started or ended since the last decision."""

    def __init__(self, moved: set[str]) -> None:
        self.moved = moved

    def add(self, job: RunningJob) -> None:
        self.moved.add(job.request.tenant)

    def remove(self, job: RunningJob) -> None:
        self.moved.add(job.request.tenant)

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        pass  # it keeps its places


class ShareOrder:
    """Jobs one by one from the tenant with the smallest weighted dominant share; what is tried counts as had, so
    that a tenant whose job does not fit does not hold up all others."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()  # what the kept order is of
        self._moved: set[str] = set()  # tenants that may have other jobs than the kept order knows
        self._touched = 0  # so many changes of the queue are known
        self._tenants: dict[str, _Tenant] = {}
        self._entries: list[_Entry] = []
        self._until: tuple[float | str, ...] = ()  # every entry before this one is in the list
        self._total = 1.0, 1.0

    def __call__(self, snapshot: Snapshot, refused: Mapping[str, float]) -> Iterator[WaitingRow]:
        """`refused`: GPUs that tenants at their limits do not get. Jobs of theirs that ask for no less are left out
        where it saves time, until `refused` is empty."""
        waiting, running, total = snapshot.waiting, table_of(snapshot.running), snapshot.free.capacity
        if not isinstance(waiting, JobQueue):
            parts = []
            for name, rows in tenant_rows(waiting).items():
                gpus, cpu = running.milli.get(name, 0) / WHOLE_GPU, float(running.cpu_milli.get(name, 0))
                parts.append(_by_share(name, _weight(snapshot.quotas, name), 0, gpus, cpu, rows, total))
            return (entry[-1] for entry in heapq.merge(*parts))
        of = waiting, running, total, snapshot.quotas
        if not self._of or any(one is not other for one, other in zip(self._of, of, strict=True)):
            self._of, self._total, self._tenants, self._entries, self._until = of, total, {}, [], ()
            moved = self._moved = set(waiting.by_tenant)
            running.view((ShareOrder, id(moved)), lambda: _MovedTenants(moved))
        self._moved.update(waiting.touched[self._touched :])
        self._touched = len(waiting.touched)
        if self._moved:
            self._update(waiting, running, snapshot.quotas)
        if len(self._entries) < _FEWEST_KEPT and self._until != _EVERYTHING:
            self._fill()
        return itertools.chain.from_iterable(self._stretches(waiting, refused))

    def _update(self, queue: JobQueue, running: RunningTable, quotas: Mapping[str, TenantQuota]) -> None:
        """Puts the jobs of tenants in anew whose queue or share has changed."""
        queues, tenants = queue.by_tenant, self._tenants
        old, fresh = set[str](), list[_Entry]()
        for name in self._moved:
            known, own = tenants.get(name), queues.get(name)
            if own is None:
                if known is not None:
                    old.add(name)
                    del tenants[name]
                continue
            state = own.version, running.milli.get(name, 0), running.cpu_milli.get(name, 0)
            if known is not None:
                if known.state == state and (not known.whole or known.kept == len(own.jobs)):
                    continue  # others joined behind those in the list
                old.add(name)
            tenants[name] = self._listed(_Tenant(name, _weight(quotas, name), own, state), fresh)
        self._moved.clear()
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
        if len(entries) > _KEPT + _MORE_KEPT:
            self._shorten()

    def _listed(self, tenant: _Tenant, fresh: list[_Entry]) -> _Tenant:
        """Lists those of its jobs that are before the end of the kept order."""
        name, weight, until, (total_gpus, total_cpu) = tenant.name, tenant.weight, self._until, self._total
        gpus, cpu, number = tenant.state[1] / WHOLE_GPU, float(tenant.state[2]), 0
        last = until[0] if until else -1.0
        tenant.whole = True
        for row in tenant.queue.rows():
            by_gpus, by_cpu = gpus / total_gpus, cpu / total_cpu
            share = (by_gpus if by_gpus >= by_cpu else by_cpu) / weight
            arrival_s = row[0].arrival_s
            if share >= last and (share, arrival_s, name, number) >= until:  # type: ignore[operator]
                tenant.whole = False
                break
            fresh.append((share, arrival_s, name, number, row))
            gpus += row[3]
            cpu += row[4]
            number += 1
        tenant.kept, tenant.gpus, tenant.cpu_milli = number, gpus, cpu
        return tenant

    def _shorten(self) -> None:
        left_out = self._entries[_KEPT:]
        del self._entries[_KEPT:]
        self._until = self._entries[-1][:-1]
        for name, kept in {entry[2]: entry[3] for entry in reversed(left_out)}.items():
            self._tenants[name].count_again(kept)

    def _fill(self) -> None:
        """Lists more jobs."""
        missing = _KEPT - len(self._entries)
        more = list(itertools.islice(heapq.merge(*map(self._rest, self._tenants.values())), missing))
        for *_, name, _, row in more:
            tenant = self._tenants[name]
            tenant.kept += 1
            tenant.gpus += row[3]
            tenant.cpu_milli += row[4]
            tenant.whole = tenant.kept == len(tenant.queue.jobs)
        self._entries += more
        self._until = self._entries[-1][:-1] if len(more) == missing else _EVERYTHING

    def _rest(self, tenant: _Tenant) -> Iterator[_Entry]:
        """The jobs of a tenant that are not in the kept order."""
        rows = tenant.queue.rows(tenant.kept)
        return _by_share(
            tenant.name, tenant.weight, tenant.kept, tenant.gpus, tenant.cpu_milli, rows, self._total
        )

    def _stretches(self, queue: JobQueue, refused: Mapping[str, float]) -> Iterator[Iterator[WaitingRow]]:
        for start in range(0, len(self._entries), _STRETCH):
            yield map(_row_of, self._entries[start : start + _STRETCH])
        if self._until != _EVERYTHING:
            yield self._behind(queue, refused)

    def _behind(self, queue: JobQueue, refused: Mapping[str, float]) -> Iterator[WaitingRow]:
        """The jobs behind the kept ones. Tenants at their limits may have thousands, which are left out."""
        more = [one for one in self._tenants.values() if not one.whole]
        fewest = 0.0 if queue.sharing else 1.0  # GPUs that a job asks for
        wanted = [one for one in more if refused.get(one.name, _ANY) > fewest]
        left_out = len(wanted) < len(more)
        for entry in heapq.merge(*[self._wanted(one, refused, fewest) for one in wanted]):
            left_out = left_out or bool(refused)
            yield entry[-1]
            if left_out and not refused:
                yield from map(_row_of, heapq.merge(*[_after(entry, self._rest(one)) for one in more]))
                return

    def _wanted(self, tenant: _Tenant, refused: Mapping[str, float], fewest: float) -> Iterator[_Entry]:
        """As `_rest`, without those that are refused."""
        name, weight, total, number = tenant.name, tenant.weight, self._total, tenant.kept - 1
        gpus, cpu = tenant.gpus, tenant.cpu_milli
        for row in tenant.queue.rows(tenant.kept):
            most, number = refused.get(name, _ANY), number + 1
            if row[3] < most:
                yield max(gpus / total[0], cpu / total[1]) / weight, row[0].arrival_s, name, number, row
            elif most <= fewest:
                return
            gpus += row[3]
            cpu += row[4]


def _weight(quotas: Mapping[str, TenantQuota], tenant: str) -> float:
    quota = quotas.get(tenant)
    return 1.0 if quota is None else max(quota.weight, 1e-9)


def _by_share(
    tenant: str,
    weight: float,
    number: int,
    gpus: float,
    cpu: float,
    rows: Iterator[WaitingRow],
    total: tuple[float, float],
) -> Iterator[_Entry]:
    """The jobs of a tenant, each with the share that the tenant has before it."""
    for at, row in enumerate(rows, number):
        yield max(gpus / total[0], cpu / total[1]) / weight, row[0].arrival_s, tenant, at, row
        gpus += row[3]
        cpu += row[4]


def _after(last: _Entry, entries: Iterator[_Entry]) -> Iterator[_Entry]:
    return itertools.dropwhile(lambda entry: entry[:4] <= last[:4], entries)
