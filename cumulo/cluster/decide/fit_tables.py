"""How many tasks of a shape fit on each node, kept up to date: a decision reads only the nodes that have changed
since it last asked for that shape. `fit` asks; `FreeCapacity` keeps the tables and writes down which nodes change.
"""

from typing import Any

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import FreeCapacity, Ints, node_set

_FEW = 24  # changed nodes that are faster looked at one by one
_MOST_TABLES = 1024
FitKey = tuple[int, int, int, int, int, tuple[str, ...]]


class FitTable:
    """Of one shape: tasks that each node could take now, and all ready nodes together. Never changed by others."""

    __slots__ = ("_able", "fits", "seen", "total")

    def __init__(self, fits: Ints, total: int, seen: int) -> None:
        self.fits, self.total = fits, total
        self.seen = seen  # so much of the capacity's changes is in it
        self._able: int | None = None

    @property
    def able(self) -> int:
        """The nodes that could take a task, as a set; kept from the first time it is asked for."""
        if self._able is None:
            self._able = node_set(self.fits > 0)
        return self._able

    def replace(self, fits: Ints) -> None:
        self.fits, self.total, self._able = fits, int(fits.sum()), None

    def set_one(self, node: int, tasks: int) -> None:
        before: int = self.fits.item(node)
        if tasks != before:
            self.fits[node] = tasks
            self.total += tasks - before
            if self._able is not None and (not tasks or not before):
                self._able ^= 1 << node

    def set_many(self, nodes: Ints, tasks: Ints) -> None:
        self.total += int(tasks.sum()) - int(self.fits[nodes].sum())
        self.fits[nodes], self._able = tasks, None


def fit_key(job: JobRequest) -> FitKey:
    """Jobs with the same have the same table."""
    return (
        0 if job.gpus_per_task else job.tasks, job.gpus_per_task, job.gpu_milli, job.cpu_milli, job.memory_mib,
        job.devices,
    )  # fmt: skip


def fit_table(job: JobRequest, free: FreeCapacity, known_key: FitKey | None = None) -> FitTable:
    key = known_key or fit_key(job)
    if free.within is not None:  # a part of another capacity, to look at only
        fits = np.where(free.ready, fit_table(job, free.within).fits, 0)
        return FitTable(fits, int(fits.sum()), 0)
    changes = free.changes
    table: FitTable | None = free.fit_tables.get(key)
    if table is None:
        if len(free.fit_tables) >= _MOST_TABLES:
            free.fit_tables.clear()
        table = free.fit_tables[key] = _inherited(key, free) or _whole(job, free)
    if table.seen < changes.forgotten:
        table.replace(_fits(job, free, None))
    elif table.seen < changes.count:
        _catch_up(table, job, free, changes.nodes[table.seen - changes.forgotten :])
    table.seen = changes.count
    return table


def _whole(job: JobRequest, free: FreeCapacity) -> FitTable:
    fits = _fits(job, free, None)
    return FitTable(fits, int(fits.sum()), free.changes.count)


def _inherited(key: FitKey, free: FreeCapacity) -> FitTable | None:
    """What the capacity that this is a copy of knew when it was copied."""
    if free.copied is None:
        return None
    tables, count = free.copied
    table: FitTable | None = tables.get(key)
    return None if table is None or table.seen != count else FitTable(table.fits.copy(), table.total, 0)


def _catch_up(table: FitTable, job: JobRequest, free: FreeCapacity, changed: list[int]) -> None:
    distinct = dict.fromkeys(changed)
    if len(distinct) <= _FEW:
        for node in distinct:
            table.set_one(node, _fits_on(job, free, node))
    else:
        nodes = np.fromiter(distinct, np.int64, len(distinct))
        table.set_many(nodes, _fits(job, free, nodes))


def _fits(job: JobRequest, free: FreeCapacity, nodes: Ints | None) -> Ints:
    """Of these nodes; None: of all."""
    at: Any = slice(None) if nodes is None else nodes
    if job.gpus_per_task == 0:
        fits: Ints = np.full(len(free.whole[at]), job.tasks, dtype=np.int64)
    elif job.fractional:
        fits = (free.gpu_milli[at] // job.gpu_milli).sum(axis=1)
    else:
        fits = free.whole[at] // job.gpus_per_task
    if job.cpu_milli:
        fits = np.minimum(fits, free.cpu_milli[at] // job.cpu_milli)
    if job.memory_mib:
        fits = np.minimum(fits, free.memory_mib[at] // job.memory_mib)
    fits = np.where(free.ready[at], fits, 0)
    return np.where(free.device_mask(job.devices)[at], fits, 0) if job.devices else fits


def _fits_on(job: JobRequest, free: FreeCapacity, node: int) -> int:
    """As `_fits`, of one node."""
    if not free.ready.item(node) or (job.devices and free.nodes[node].device not in job.devices):
        return 0
    if job.gpus_per_task == 0:
        fits = job.tasks
    elif job.fractional:
        fits = sum([share // job.gpu_milli for share in free.gpu_milli[node].tolist()])
    else:
        fits = free.whole.item(node) // job.gpus_per_task
    if job.cpu_milli and (by_cores := free.cpu_milli.item(node) // job.cpu_milli) < fits:
        fits = by_cores
    if job.memory_mib and (by_memory := free.memory_mib.item(node) // job.memory_mib) < fits:
        fits = by_memory
    return fits
