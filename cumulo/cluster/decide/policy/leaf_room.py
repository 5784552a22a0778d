"""How many tasks of a gang fit under each leaf switch, and which nodes they would take. The topology placer asks.

On a busy cluster a few nodes of ten thousand can take a task: those alone are looked at, one by one. On an idle one
all of them are, in columns.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cumulo.cluster.decide.fit import (
    AbleNode,
    able_nodes,
    only_gpus,
    packed_among,
    packed_nodes,
    slots,
    tasks_that_fit,
)
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, Ints

_FEW_NODES = 200  # with room for a task, that are faster looked at one by one
_FEW_LEAVES = 4

Counts = list[tuple[int, int]]  # nodes by number, and how many tasks each gets


class LeafRoom(Protocol):
    """Of one gang, for which there is room."""

    room: dict[int, int]  # tasks that fit under each leaf that can take one

    def idle(self, leaf: int) -> int:
        """Its free GPUs."""

    def taken(self, tasks: int, leaves: list[int]) -> Counts:
        """Of each of these leaves, which have room for all tasks: the nodes that are filled there, and the most
        tasks that one of them gets."""

    def filled(self, tasks: int, leaves: Iterable[int]) -> Counts:
        """The nodes of the leaves in the order given, until all tasks have a place."""

    def packed(self) -> Counts:
        """The nodes of `pack_gang`."""


def leaf_room(job: JobRequest, free: FreeCapacity, leaves: "Leaves") -> LeafRoom | None:
    """None: there is too little."""
    if (free.within is None or only_gpus(job)) and slots(job, free) < job.tasks:
        return None  # as counting tells
    able = able_nodes(job, free, _FEW_NODES)
    found: LeafRoom = (
        _AllNodes(job, free, leaves) if able is None else FewNodes(job, able, leaves, leaves.idle(free))
    )
    return found if sum(found.room.values()) >= job.tasks else None


@dataclass(slots=True)
class FewNodes:
    """`able`: all nodes that could take a task."""

    job: JobRequest
    able: list[AbleNode]
    leaves: "Leaves"
    free_gpus: Sequence[int]  # of each leaf
    gained: Mapping[int, int] = field(default_factory=dict)  # of leaves: GPUs that are free besides
    room: dict[int, int] = field(default_factory=dict)
    _nodes: dict[int, Counts] = field(default_factory=dict)  # of each leaf, in order, with the tasks that fit

    def __post_init__(self) -> None:
        of, room, nodes = self.leaves.of, self.room, self._nodes
        for _, node, tasks in self.able:
            leaf = of[node]
            if leaf in room:
                room[leaf] += tasks
                nodes[leaf].append((node, tasks))
            else:
                room[leaf], nodes[leaf] = tasks, [(node, tasks)]

    def idle(self, leaf: int) -> int:
        return self.free_gpus[leaf] + self.gained.get(leaf, 0)

    def taken(self, tasks: int, leaves: list[int]) -> Counts:
        counts = [fill_nodes(tasks, self._nodes[leaf]) for leaf in leaves]
        return [(len(some), max([count for _, count in some])) for some in counts]

    def filled(self, tasks: int, leaves: Iterable[int]) -> Counts:
        return fill_nodes(tasks, itertools.chain.from_iterable([self._nodes[leaf] for leaf in leaves]))

    def packed(self) -> Counts:
        return packed_among(self.job, self.able)


class _AllNodes:
    """In columns, of all nodes."""

    def __init__(self, job: JobRequest, free: FreeCapacity, leaves: "Leaves") -> None:
        self.job, self.free, self.leaves, self.fits = job, free, leaves, tasks_that_fit(job, free)
        self.room = {leaf: tasks for leaf, tasks in enumerate(leaves.sums(self.fits)) if tasks}
        self._idle = leaves.idle(free)

    def idle(self, leaf: int) -> int:
        return self._idle[leaf]

    def taken(self, tasks: int, leaves: list[int]) -> Counts:
        return self.leaves.taken(tasks, self.fits, leaves)

    def filled(self, tasks: int, leaves: Iterable[int]) -> Counts:
        return fill_nodes(
            tasks, itertools.chain.from_iterable(self.leaves.rooms(self.fits, leaf) for leaf in leaves)
        )

    def packed(self) -> Counts:
        found = packed_nodes(self.job, self.free)
        assert found is not None  # there is room
        return found


def fill_nodes(tasks: int, rooms: Iterable[tuple[int, int]]) -> Counts:
    """Fills nodes, each with the tasks that fit there, in the order given until all tasks have a place."""
    chosen: Counts = []
    for node, room in rooms:
        if room:
            chosen.append((node, room if room < tasks else tasks))
            tasks -= room
            if tasks <= 0:
                break
    return chosen


class Leaves:
    """The nodes under each leaf switch, by number."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        under: dict[str, list[int]] = {}
        for number, node in enumerate(nodes):
            under.setdefault(node.leaf, []).append(number)
        self.names = list(under)
        self.nodes = [np.array(some, dtype=np.int64) for some in under.values()]  # of each leaf
        numbers = {leaf: number for number, leaf in enumerate(under)}
        self.of = [numbers[node.leaf] for node in nodes]  # of each node: its leaf, by number
        self._of = np.array(self.of, dtype=np.int64)
        by_name = sorted(range(len(self.names)), key=self.names.__getitem__)
        self.name_rank = np.argsort(by_name).tolist()  # of each leaf: how many names come before its own
        self._nodes = np.concatenate(self.nodes)
        self._many = np.array([len(some) for some in self.nodes], dtype=np.int64)
        self._first = self._many.cumsum() - self._many  # of each leaf: its first node in `_nodes`

    def sums(self, of_nodes: Ints) -> list[int]:
        """Of each leaf: the sum over its nodes."""
        found: list[int] = np.bincount(self._of, of_nodes, len(self.nodes)).astype(np.int64).tolist()
        return found

    def idle(self, free: FreeCapacity) -> list[int]:
        """Of each leaf: its free GPUs. Kept up to date, next to what is known of shapes of tasks."""
        changes = free.changes
        known: _Idle | None = free.fit_tables.get(self)
        if known is None or known.seen < changes.forgotten:
            known = free.fit_tables[self] = _Idle(free.whole.tolist(), self.sums(free.whole), changes.count)
        elif known.seen < changes.count:
            for node in changes.nodes[known.seen - changes.forgotten :]:
                whole: int = free.whole.item(node)
                known.of_leaf[self.of[node]] += whole - known.of_node[node]
                known.of_node[node] = whole
            known.seen = changes.count
        return known.of_leaf

    def rooms(self, fits: Ints, leaf: int) -> Iterable[tuple[int, int]]:
        """The nodes of a leaf, and how many tasks fit there."""
        nodes = self.nodes[leaf]
        return zip(nodes.tolist(), fits[nodes].tolist(), strict=True)

    def taken(self, tasks: int, fits: Ints, leaves: list[int]) -> Counts:
        """As `LeafRoom` has it."""
        if len(leaves) <= _FEW_LEAVES:
            counts = [[count for _, count in fill_nodes(tasks, self.rooms(fits, leaf))] for leaf in leaves]
            return [(len(some), max(some)) for some in counts]
        many = self._many[leaves]
        at, rows = np.arange(many.max()), np.arange(len(leaves))
        nodes = self._nodes.take(self._first[leaves][:, None] + at, mode="clip")  # [leaves, nodes]
        room = np.where(at < many[:, None], fits[nodes], 0)
        filled = room.cumsum(axis=1)
        last = (filled < tasks).sum(axis=1)  # the node, by its place in the row, that gets the rest
        before = at < last[:, None]
        used = (before & (room > 0)).sum(axis=1) + 1
        rest = tasks - (filled[rows, last] - room[rows, last])
        most = np.maximum(np.where(before, room, 0).max(axis=1), rest)
        return list(zip(used.tolist(), most.tolist(), strict=True))


@dataclass(slots=True)
class _Idle:
    """Free GPUs of a capacity."""

    of_node: list[int]
    of_leaf: list[int]
    seen: int  # so much of the capacity's changes is in it
