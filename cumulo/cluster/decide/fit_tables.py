"""How many tasks of a shape fit on each node, kept up to date: a decision reads only the nodes that have changed
since it last asked for that shape, whatever devices its jobs accept. `fit` asks; `FreeCapacity` keeps the tables
and writes down which nodes change.
"""

from typing import Any

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import FreeCapacity, Ints, node_set

_FEW = 24  # changed nodes that are faster looked at one by one
_MOST_TABLES = 1024
FitKey = tuple[int, int, int, int, int]


class FitTable:
    """Of one shape of tasks: how many each node could take now, whatever its device. Never changed by others."""

    __slots__ = ("_able", "by_device", "fits", "seen")

    def __init__(self, fits: Ints, by_device: list[int], seen: int) -> None:
        self.fits = fits
        self.by_device = by_device  # on all nodes of each device together
        self.seen = seen  # so much of the capacity's changes is in it
        self._able: int | None = None

    @property
    def total(self) -> int:
        """On all nodes together."""
        return sum(self.by_device)

    @property
    def able(self) -> int:
        """The nodes that could take a task, as a set; kept from the first time it is asked for."""
        if self._able is None:
            self._able = node_set(self.fits > 0)
        return self._able

    def set_one(self, node: int, device: int, tasks: int) -> None:
        before: int = self.fits.item(node)
        if tasks != before:
            self.fits[node] = tasks
            self.by_device[device] += tasks - before
            if self._able is not None and (not tasks or not before):
                self._able ^= 1 << node

    def set_many(self, nodes: Ints, devices: Ints, tasks: Ints) -> None:
        more = _sums(tasks - self.fits[nodes], devices, len(self.by_device))
        self.by_device = [before + some for before, some in zip(self.by_device, more, strict=True)]
        self.fits[nodes], self._able = tasks, None


class FitsOnDevices:
    """The same on the nodes of some devices: jobs that differ in these alone have one table."""

    __slots__ = ("_devices", "_free", "_of")

    def __init__(self, of: FitTable, devices: tuple[str, ...], free: FreeCapacity) -> None:
        self._of, self._devices, self._free = of, devices, free

    @property
    def total(self) -> int:
        numbers, by_device = self._free.devices, self._of.by_device
        return sum([by_device[numbers[name]] for name in self._devices if name in numbers])

    @property
    def able(self) -> int:
        return self._of.able & self._free.usable_set(self._devices)

    @property
    def fits(self) -> Ints:
        return np.where(self._free.device_mask(self._devices), self._of.fits, 0)


def fit_key(job: JobRequest) -> FitKey:
    """Jobs with the same have the same table."""
    return (
        0 if job.gpus_per_task else job.tasks, job.gpus_per_task, job.gpu_milli, job.cpu_milli, job.memory_mib,
    )  # fmt: skip


def fit_table(
    job: JobRequest, free: FreeCapacity, known_key: FitKey | None = None
) -> FitTable | FitsOnDevices:
    """How many tasks of a job fit on each node now."""
    if free.within is not None:  # a part of another capacity, to look at only
        fits = np.where(free.ready, fit_table(job, free.within).fits, 0)
        return FitTable(fits, [int(fits.sum())], 0)
    table = _kept(job, free, known_key or fit_key(job))
    return FitsOnDevices(table, job.devices, free) if job.devices else table


def _kept(job: JobRequest, free: FreeCapacity, key: FitKey) -> FitTable:
    changes = free.changes
    table: FitTable | None = free.fit_tables.get(key)
    if table is not None and table.seen < changes.forgotten:
        table = None
    if table is None:
        if len(free.fit_tables) >= _MOST_TABLES:
            free.fit_tables.clear()
        table = free.fit_tables[key] = _inherited(key, free) or _whole(job, free)
    if table.seen < changes.count:
        _catch_up(table, job, free, changes.nodes[table.seen - changes.forgotten :])
    table.seen = changes.count
    return table


def _whole(job: JobRequest, free: FreeCapacity) -> FitTable:
    fits = _fits(job, free, None)
    return FitTable(fits, _sums(fits, free.device_of, len(free.devices)), free.changes.count)


def _sums(tasks: Ints, devices: Ints, many: int) -> list[int]:
    """By device. `devices`: the number of that of each; there are so many."""
    if many == 1:
        return [int(tasks.sum())]
    found: list[int] = np.bincount(devices, weights=tasks, minlength=many).astype(np.int64).tolist()
    return found


def _inherited(key: FitKey, free: FreeCapacity) -> FitTable | None:
    """What the capacity that this is a copy of knew when it was copied."""
    if free.copied is None or free.changes.forgotten:
        return None
    tables, count = free.copied
    table: FitTable | None = tables.get(key)
    if table is None or table.seen != count:
        return None
    return FitTable(table.fits.copy(), table.by_device.copy(), 0)


def _catch_up(table: FitTable, job: JobRequest, free: FreeCapacity, changed: list[int]) -> None:
    distinct = dict.fromkeys(changed)
    if len(distinct) <= _FEW:
        for node in distinct:
            table.set_one(node, free.device_of.item(node), _fits_on(job, free, node))
    else:
        nodes = np.fromiter(distinct, np.int64, len(distinct))
        table.set_many(nodes, free.device_of[nodes], _fits(job, free, nodes))


def _fits(job: JobRequest, free: FreeCapacity, nodes: Ints | None) -> Ints:
    """Of these nodes, whatever their devices; None: of all."""
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
    return np.where(free.ready[at], fits, 0)


def _fits_on(job: JobRequest, free: FreeCapacity, node: int) -> int:
    """As `_fits`, of one node."""
    if not free.ready.item(node):
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
