"""What could be preempted on each node, kept up to date while jobs start and end. A search for room asks up to
which priority jobs would have to stop, and where the fewest would: it costs what has changed since it last asked.
"""

import bisect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob
from cumulo.cluster.decide.nodes import FreeCapacity, Ints
from cumulo.cluster.decide.policy.slots_up_to import SlotsUpTo
from cumulo.cluster.decide.running import RunningView, table_of
from cumulo.cluster.decide.snapshot import Snapshot

_MOST_MOVED = 50_000  # nodes that are written down
_MANY_MOVED = 200  # nodes that are faster looked at together with all others
_MOST_LISTS = 4096
_MORE_LISTED = 64  # nodes of a list, besides twice as many as were asked for
_EVERY_NODE = 1 << 62
_NODE_BITS = 32


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


NodeCodes = list[int]  # the GPUs that a node misses for a task more, then the node


def coded_nodes(codes: NodeCodes) -> list[int]:
    return [code & ((1 << _NODE_BITS) - 1) for code in codes]


@dataclass(slots=True)
class _NodeOrder:
    """The first nodes on which a task would have room if jobs stopped, where the fewest GPUs are missing first."""

    codes: NodeCodes  # sorted
    code_of: dict[int, int]  # of the nodes that are in the list
    until: int  # every code up to this one is in the list
    seen: int  # so many moves are in it


StateMark = tuple[list[int], int, Ints]  # the moves that were written down, how many, and the ready nodes


class PreemptibleUpTo(RunningView):
    """GPUs that the preemptible jobs up to each priority have on each node."""

    def __init__(self, index: Mapping[str, int]) -> None:
        self.index = index
        self.levels: list[int] = []  # priorities that were seen, in order
        self.milli: Ints = np.zeros((len(index), 0), dtype=np.int32)  # thousandths of GPUs: [nodes, levels]
        self.shares = 0  # running jobs that have a share of a GPU
        self._on: list[dict[int, int]] = [{} for _ in index]  # of each node: the same of each priority alone
        self._moved: list[int] = []  # nodes on which a job started or ended, in that order
        self._changed: set[int] = set()  # those that are not yet in the counts below
        self._slots: SlotsUpTo | None = None
        self._ready: Ints | None = None  # the ready nodes that are in the counts
        self._orders: dict[tuple[int, int, tuple[str, ...]], _NodeOrder] = {}

    def add(self, job: RunningJob) -> None:
        self._move(job, 1)

    def remove(self, job: RunningJob) -> None:
        self._move(job, -1)

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        self._moved = self._moved.copy()  # it keeps its places, and what was found for a state is old

    def state(self, free: FreeCapacity) -> "StateMark":
        return self._moved, len(self._moved), free.ready

    def unchanged(self, nodes: set[int], since: "StateMark", free: FreeCapacity) -> bool:
        """Whether no job started or ended on these nodes since, and none of them failed or came back."""
        moved, seen, ready = since
        return moved is self._moved and ready is free.ready and nodes.isdisjoint(moved[seen:])

    def _move(self, job: RunningJob, sign: int) -> None:
        request = job.request
        if not request.gpus_per_task:
            return
        if request.fractional:
            self.shares += sign
        nodes = [self.index[place.node] for place in job.places]
        self._moved += dict.fromkeys(nodes)
        self._changed.update(nodes)
        if len(self._moved) > _MOST_MOVED:
            self._moved = []
            self._orders.clear()
        if not request.preemptible:
            return
        at = bisect.bisect_left(self.levels, request.priority)
        if at == len(self.levels) or self.levels[at] != request.priority:
            self._insert(at, request.priority)
        change, above = sign * request.milli_per_task, self.milli[:, at:]
        for node in nodes:
            above[node] += change
            on = self._on[node]
            on[request.priority] = on.get(request.priority, 0) + change
            if not on[request.priority]:
                del on[request.priority]

    def _insert(self, at: int, level: int) -> None:
        """A priority that was not seen before: as much as up to the one below it, until its jobs are counted."""
        below = self.milli[:, at - 1] if at else np.zeros(len(self.index), dtype=np.int32)
        self.levels.insert(at, level)
        self.milli = np.insert(self.milli, at, below, axis=1)
        if self._slots is not None:
            self._slots.insert(level)

    def columns(self, level: int) -> Ints:
        """Up to this priority, as `PreemptibleOnNodes` has them; of GPUs only."""
        found: Ints = np.zeros((3, len(self.index)), dtype=np.int64)
        if at := bisect.bisect(self.levels, level):
            found[0] = self.milli[:, at - 1]
        return found

    def first_with_room(self, job: JobRequest, free: FreeCapacity) -> int | None:
        """The number of the lowest priority up to which jobs would have to stop, at least; None: even all of those
        below the job's own are too few. Of jobs that ask for whole GPUs only."""
        found = self.first_of_all(job, free)
        return None if found is None or self.levels[found] >= job.priority else found

    def first_of_all(self, job: JobRequest, free: FreeCapacity) -> int | None:
        """As `first_with_room`, of a job that is more urgent than all others."""
        return self._counted(free).first_with(job.tasks, job.gpus_per_task, job.devices)

    def catch_up(self, free: FreeCapacity) -> None:
        """Counts what has changed. In every decision: after many changes, it would make one decision slow."""
        self._counted(free)

    def _counted(self, free: FreeCapacity) -> SlotsUpTo:
        slots = self._slots
        if slots is None or slots.free is not free:
            slots = self._slots = SlotsUpTo(free, self.levels)
            self._changed, self._ready = {node for node, on in enumerate(self._on) if on}, free.ready
            self._orders.clear()
        elif self._ready is not free.ready:
            other = np.flatnonzero(self._ready != free.ready).tolist()
            self._moved += other
            self._changed.update(other)
            self._ready = free.ready
        if self._changed:
            for node in self._changed:
                slots.set_node(node, self._on[node])
            self._changed.clear()
        return slots

    def codes_in_order(self, job: JobRequest, at: int, free: FreeCapacity, at_most: int) -> NodeCodes:
        """The nodes that have room for a task more if all jobs up to the priority of this number stopped, where the
        fewest GPUs are missing first. After `first_with_room` of the same job, which asks for whole GPUs only."""
        key = self.levels[at], job.gpus_per_task, job.devices
        order = self._orders.get(key)
        if order is not None and len(self._moved) - order.seen <= _MANY_MOVED:
            self._put_in_order(order, key, at, free)
        else:
            order = None
        if order is None or (len(order.codes) < at_most and order.until != _EVERY_NODE):
            if len(self._orders) > _MOST_LISTS:
                self._orders.clear()
            order = self._orders[key] = self._ordered(key, at, free, 2 * at_most + _MORE_LISTED)
        return order.codes[:at_most]

    def _put_in_order(
        self, order: _NodeOrder, key: tuple[int, int, tuple[str, ...]], at: int, free: FreeCapacity
    ) -> None:
        (_, each, devices), milli = key, self.milli[:, at]
        for node in dict.fromkeys(self._moved[order.seen :]):
            need = each - free.whole.item(node) % each
            able = free.ready.item(node) and milli.item(node) >= WHOLE_GPU * need
            able = able and (not devices or free.nodes[node].device in devices)
            code = need << _NODE_BITS | node if able else None
            before = order.code_of.get(node)
            if code is not None and code > order.until:
                code = None
            if code == before:
                continue
            if before is not None:
                del order.codes[bisect.bisect_left(order.codes, before)], order.code_of[node]
            if code is not None:
                bisect.insort(order.codes, code)
                order.code_of[node] = code
        order.seen = len(self._moved)

    def _ordered(
        self, key: tuple[int, int, tuple[str, ...]], at: int, free: FreeCapacity, at_most: int
    ) -> _NodeOrder:
        _, each, devices = key
        need = np.array([each - room % each for room in range(len(free.room))], dtype=np.int64).take(
            free.whole
        )
        able = (self.milli[:, at] >= WHOLE_GPU * need) & free.ready
        if devices:
            able &= free.device_mask(devices)
        nodes = np.flatnonzero(able)
        codes, until = (need[nodes] << _NODE_BITS) + nodes, _EVERY_NODE
        if len(codes) > at_most:
            codes = np.partition(codes, at_most - 1)[:at_most]
            until = int(codes[-1])
        codes.sort()
        found: list[int] = codes.tolist()
        code_of = dict(zip(coded_nodes(found), found, strict=True))
        return _NodeOrder(found, code_of, until, len(self._moved))


def preemptible_up_to(snapshot: Snapshot) -> PreemptibleUpTo:
    index = snapshot.free.index
    return table_of(snapshot.running).view(PreemptibleUpTo, lambda: PreemptibleUpTo(index))
