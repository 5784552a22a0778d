"""Room for a gang by stopping others: node by node, where the least has to stop. Priorities and reclaimed quotas
choose who may be stopped; ten thousand nodes are searched in a millisecond, because what could be stopped on each
is kept in columns.
"""

import bisect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cumulo.cluster.decide.fit import only_gpus, slots
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob
from cumulo.cluster.decide.nodes import FreeCapacity, Ints
from cumulo.cluster.decide.running import RunningView, jobs_on_nodes, table_of
from cumulo.cluster.decide.snapshot import Snapshot

_MORE_NODES = 12  # that are priced, besides one for each missing task
_MOST_PRICED = 200_000  # nodes for which it is kept what was found


class PreemptibleOnNodes(RunningView):
    """What the preemptible jobs of each kind have on each node: thousandths of GPUs, of cores, and MiB."""

    def __init__(self, index: Mapping[str, int], kind: Callable[[RunningJob], Hashable]) -> None:
        self.index, self.kind = index, kind
        self.of: dict[Hashable, Ints] = {}

    def add(self, job: RunningJob) -> None:
        self._move(job, 1)

    def remove(self, job: RunningJob) -> None:
        self._move(job, -1)

    def _move(self, job: RunningJob, sign: int) -> None:
        request = job.request
        if not request.preemptible:
            return
        columns = self.of.get(self.kind(job))
        if columns is None:
            columns = self.of[self.kind(job)] = np.zeros((3, len(self.index)), dtype=np.int64)
        for place in job.places:
            node = self.index[place.node]
            columns[0, node] += sign * request.milli_per_task
            if request.cpu_milli or request.memory_mib:
                columns[1, node] += sign * request.cpu_milli
                columns[2, node] += sign * request.memory_mib


def preemptible_on_nodes(snapshot: Snapshot, kind: Callable[[RunningJob], Hashable]) -> dict[Hashable, Ints]:
    """`kind`: always the same function for one division."""
    index = snapshot.free.index
    return table_of(snapshot.running).view(kind, lambda: PreemptibleOnNodes(index, kind)).of


class PreemptibleUpTo(RunningView):
    """Thousandths of GPUs that the preemptible jobs up to each priority have on each node."""

    def __init__(self, index: Mapping[str, int]) -> None:
        self.index = index
        self.levels: list[int] = []  # priorities that were seen, in order
        self.milli: Ints = np.zeros((0, len(index)), dtype=np.int32)  # [levels, nodes]
        self._left: tuple[FreeCapacity, Ints] | None = None  # what is free, until a job starts or ends

    def add(self, job: RunningJob) -> None:
        self._move(job, 1)

    def remove(self, job: RunningJob) -> None:
        self._move(job, -1)

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        pass  # it keeps its places

    def _move(self, job: RunningJob, sign: int) -> None:
        self._left = None
        request = job.request
        if not request.preemptible or not request.gpus_per_task:
            return
        at = bisect.bisect_left(self.levels, request.priority)
        if at == len(self.levels) or self.levels[at] != request.priority:
            below = self.milli[at - 1] if at else np.zeros(len(self.index), dtype=np.int32)
            self.levels.insert(at, request.priority)
            self.milli = np.insert(self.milli, at, below, axis=0)
        change, above = sign * request.milli_per_task, self.milli[at:]
        for place in job.places:
            above[:, self.index[place.node]] += change

    def columns(self, level: int) -> Ints:
        """Up to this priority, as `PreemptibleOnNodes` has them; of GPUs only."""
        found: Ints = np.zeros((3, len(self.index)), dtype=np.int64)
        if at := bisect.bisect(self.levels, level):
            found[0] = self.milli[at - 1]
        return found

    def first_with_room(self, job: JobRequest, free: FreeCapacity) -> int | None:
        """The number of the lowest priority up to which jobs would have to stop, at least; None: even all of those
        below the job's own are too few. Of jobs that ask for whole GPUs only."""
        able = free.ready & free.device_mask(job.devices) if job.devices else free.ready
        if self._left is None or self._left[0] is not free:
            self._left = free, free.gpu_milli.sum(axis=1, dtype=np.int32)
        left, each, everywhere = self._left[1], WHOLE_GPU * job.gpus_per_task, bool(able.all())

        one_fits = 2 * each > WHOLE_GPU * (len(free.room) - 1)  # one task on a node at most: no division

        def too_few(at: int) -> bool:
            room = left + self.milli[at]
            tasks: Ints = room >= each if one_fits else room // each
            return int((tasks if everywhere else tasks[able]).sum(dtype=np.int32)) < job.tasks

        low, high = 0, bisect.bisect_left(self.levels, job.priority)
        if not high or too_few(high - 1):
            return None
        while low < high - 1:
            middle = (low + high - 1) // 2
            low, high = (middle + 1, high) if too_few(middle) else (low, middle + 1)
        return low


def preemptible_up_to(snapshot: Snapshot) -> PreemptibleUpTo:
    index = snapshot.free.index
    return table_of(snapshot.running).view(PreemptibleUpTo, lambda: PreemptibleUpTo(index))


_Priced = tuple[float, float, list[RunningJob]]  # what it costs to stop these jobs, and what next decides


class PricedNodes(RunningView):
    """What was found for nodes: it holds as long as nothing starts or ends there, which their versions tell."""

    def __init__(self) -> None:
        self.of: dict[tuple[Hashable, int], tuple[int, _Priced | None]] = {}

    def add(self, job: RunningJob) -> None:
        if len(self.of) > _MOST_PRICED:
            self.of.clear()

    def remove(self, job: RunningJob) -> None:
        pass

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        self.of.clear()


@dataclass(slots=True)
class RoomSearch:
    """Who may be stopped for a job, and in which order: the cheapest first."""

    job: JobRequest
    snapshot: Snapshot
    columns: Ints  # what may be stopped, on each node
    may_stop: Callable[[RunningJob, list[RunningJob]], bool]  # a job, besides those that are stopped already
    price: Callable[[RunningJob], tuple[float, ...]]
    # Told of those that stop, node by node: whether it is clear now that it is not worth it.
    too_much: Callable[[list[RunningJob]], bool] | None = None
    # Searches of an equal kind find the same jobs on the same node; None: `may_stop` looks at more than the job.
    kind: Hashable = None
    _prices: dict[str, tuple[float, ...]] = field(default_factory=dict)  # as far as somebody asked
    _stopped: set[str] = field(default_factory=set)

    def _price(self, one: RunningJob) -> tuple[float, ...]:
        known = self._prices.get(one.job_id)
        if known is None:
            known = self._prices[one.job_id] = self.price(one)
        return known

    def find(self) -> tuple[list[RunningJob], FreeCapacity] | None:
        """Jobs to stop, none that is not needed on its node, and the cluster without them; None: no room,
        or it costs too much."""
        free = then = self.snapshot.free  # copied when the first job stops
        job, on = self.job, jobs_on_nodes(self.snapshot.running)
        kept = None
        if self.kind is not None:
            kept = table_of(self.snapshot.running).view(PricedNodes, PricedNodes).of
        chosen: list[RunningJob] = []
        while (missing := job.tasks - slots(job, then)) > 0:
            priced: list[tuple[float, float, int, list[RunningJob]]] = []
            for node in self._candidates(then, missing, chosen):
                found = self._priced(node, then, on, chosen, kept)
                if found is not None:
                    priced.append((found[0], found[1], node, found[2]))
            if not priced:
                return None
            touched: set[str] = set()  # by those that stop: what was found for these nodes is old
            for _, _, node, victims in sorted(priced, key=lambda one: one[:3]):
                if then.nodes[node].name in touched:
                    victims = self._victims(node, then, on, chosen)
                if self.too_much is not None and self.too_much(victims):
                    return None
                if then is free:
                    then = free.copy()
                for victim in victims:
                    then.release(victim.request, victim.places)
                    chosen.append(victim)
                    self._stopped.add(victim.job_id)
                    touched.update(place.node for place in victim.places)
                if slots(job, then) >= job.tasks:
                    break
        return chosen, then if then is not free else free.copy()

    def _priced(
        self,
        node: int,
        free: FreeCapacity,
        on: Mapping[str, Mapping[str, RunningJob]],
        chosen: list[RunningJob],
        kept: dict[tuple[Hashable, int], tuple[int, _Priced | None]] | None,
    ) -> _Priced | None:
        """`_victims`, and what they cost; None: there are none."""
        version = int(free.version[node])
        if kept is not None and (known := kept.get((self.kind, node))) is not None and known[0] == version:
            return known[1]
        victims = self._victims(node, free, on, chosen)
        found: _Priced | None = None
        if victims:
            prices = [self._price(one) for one in victims]
            found = sum(price[0] for price in prices), sum(price[-1] for price in prices), victims
        if kept is not None:
            kept[self.kind, node] = version, found
        return found

    def _candidates(self, free: FreeCapacity, missing: int, chosen: list[RunningJob]) -> list[int]:
        """Nodes that have room for a task more if all stopped that may; where the fewest GPUs are missing first."""
        job, columns = self.job, self.columns
        if chosen:
            columns = columns.copy()
            for one in chosen:
                for place in one.places:
                    columns[0, free.index[place.node]] -= one.request.milli_per_task
                    columns[1, free.index[place.node]] -= one.request.cpu_milli
                    columns[2, free.index[place.node]] -= one.request.memory_mib
        gpus, cpu, memory = columns
        if only_gpus(job):
            each = job.gpus_per_task
            missing_with = np.array([each - room % each for room in range(len(free.room))], dtype=np.int16)
            need = missing_with.take(free.whole)  # small numbers are sorted much faster
            able = gpus >= WHOLE_GPU * missing_with.astype(np.int64).take(free.whole)
        else:
            left = free.gpu_milli.sum(axis=1, dtype=np.int64)
            need = np.maximum(0, job.milli_per_task - left)
            able = (left + gpus >= job.milli_per_task) & (free.cpu_milli + cpu >= job.cpu_milli)
            able &= (free.memory_mib + memory >= job.memory_mib) & ((gpus > 0) | (cpu > 0) | (memory > 0))
        able &= free.ready
        if job.devices:
            able &= free.device_mask(job.devices)
        found = np.flatnonzero(able)
        found = found[np.argsort(need[found], kind="stable")]
        return [int(node) for node in found[: missing + _MORE_NODES]]

    def _victims(
        self,
        node: int,
        free: FreeCapacity,
        on: Mapping[str, Mapping[str, RunningJob]],
        chosen: list[RunningJob],
    ) -> list[RunningJob]:
        """The cheapest jobs of a node without which it has room for one task more than now."""
        name, stopped = free.nodes[node].name, self._stopped
        there = [
            one for job_id, one in on.get(name, {}).items()
            if one.request.preemptible and job_id not in stopped and self.may_stop(one, chosen)
        ]  # fmt: skip
        if len(there) > 1:
            there.sort(key=lambda one: (*self._price(one), one.job_id))
        state = _NodeState(self.job, free, node)
        before, taken = state.tasks(), list[RunningJob]()
        for one in there:
            if not taken or self.may_stop(one, chosen + taken):
                state.move(one, name, 1)
                taken.append(one)
                if state.tasks() > before:
                    break
        else:
            return []
        for one in taken[:-1]:
            state.move(one, name, -1)
            if state.tasks() > before:
                taken.remove(one)
            else:
                state.move(one, name, 1)
        return taken


class _NodeState:
    """What is free on one node while jobs are taken off it."""

    def __init__(self, job: JobRequest, free: FreeCapacity, node: int) -> None:
        self.job = job
        self.shares: list[int] = free.gpu_milli[node].tolist()
        self.cpu_milli, self.memory_mib = int(free.cpu_milli[node]), int(free.memory_mib[node])

    def move(self, one: RunningJob, name: str, sign: int) -> None:
        for place in one.places:
            if place.node == name:
                self.cpu_milli += sign * one.request.cpu_milli
                self.memory_mib += sign * one.request.memory_mib
                for gpu in place.gpus:
                    self.shares[gpu] += sign * one.request.gpu_milli

    def tasks(self) -> int:
        job = self.job
        fits = job.tasks
        if job.fractional:
            fits = sum(share // job.gpu_milli for share in self.shares)
        elif job.gpus_per_task:
            fits = self.shares.count(WHOLE_GPU) // job.gpus_per_task
        if job.cpu_milli:
            fits = min(fits, self.cpu_milli // job.cpu_milli)
        if job.memory_mib:
            fits = min(fits, self.memory_mib // job.memory_mib)
        return fits
