"""Topology-aware placement: every way a gang could lie under the leaf switches is priced by what it does to the
job's step, and the fastest is taken; among equals the one that leaves the most whole leaves free.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cumulo.cluster.decide.fit import pack_gang, packed_nodes, slots, task_places, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, Ints, NodeChanges
from cumulo.cluster.decide.snapshot import Snapshot
from cumulo.cluster.decide.step_time import LeafFabric, leaf_fabric, uplinks_of

_MOST_LEAVES_TRIED = 32
_FEW_LEAVES = 4  # that are faster looked at one by one


_Counts = list[tuple[int, int]]  # nodes by number, and how many tasks each gets


@dataclass(frozen=True, slots=True)
class PricedWay:
    """One way to place a gang, with its price."""

    name: str
    counts: _Counts | None  # None: under the leaf of this number, found when it is the best
    step_s: float
    leaves: int
    left_over: int  # free GPUs that stay on the leaves it takes: fewer is tidier
    leaf: int = -1


@dataclass
class TopologyPlacer:
    """A placer for one snapshot. `why` says for each job that it placed between which ways it chose."""

    fabric: LeafFabric
    leaves: "Leaves"
    # Jobs on the uplinks of each leaf, with those that this decision starts and without those that it stops.
    busy: Mapping[str, int]
    why: dict[str, str] = field(default_factory=dict)

    def __call__(self, job: JobRequest, free: FreeCapacity) -> tuple[TaskPlace, ...] | None:
        if self.packs(job):
            return pack_gang(job, free)
        if slots(job, free) < job.tasks:
            return None
        fits = tasks_that_fit(job, free)
        found = list(self._ways(job, fits, free))
        found.sort(key=lambda one: (round(one.step_s, 9), one.leaves, one.left_over))
        best, worst = found[0], found[-1]
        self.why[job.job_id] = f"{best.name}: a step of {1e3 * best.step_s:.4g} ms" + (
            f"; {worst.name} would take {1e3 * worst.step_s:.4g} ms" if worst.step_s > best.step_s else ""
        )
        counts = best.counts
        if counts is None:
            counts = _take(job.tasks, fits, [self.leaves.nodes[best.leaf]])
        return task_places(job, free, counts)

    @staticmethod
    def packs(job: JobRequest) -> bool:
        """Whether there is nothing to choose between."""
        return job.tasks == 1 or not job.gpus_per_task or job.fractional

    def started(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        """Those that are placed after this gang share the uplinks with it, as they do with the running ones."""
        self._count(job, places, 1)

    def stopped(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        """Those that are placed after this gang was stopped do not share the uplinks with it."""
        self._count(job, places, -1)

    def _count(self, job: JobRequest, places: Sequence[TaskPlace], sign: int) -> None:
        crossed = () if job.step is None else self.fabric.crossing(places)
        if crossed:
            busy = dict(self.busy)
            for leaf in crossed:
                busy[leaf] = busy.get(leaf, 0) + sign
            self.busy = busy

    def _ways(self, job: JobRequest, fits: Ints, free: FreeCapacity) -> Iterator[PricedWay]:
        """Under the best and the worst leaf that has room; over as few leaves as possible; over the leaves with
        idle uplinks; packed without looking."""
        leaves, room = self.leaves, self.leaves.sums(fits)
        names, nodes, idle = leaves.names, leaves.nodes, leaves.idle(free)
        able = sorted([leaf for leaf, tasks in enumerate(room) if tasks >= job.tasks], key=room.__getitem__)
        if able:
            able = able[:_MOST_LEAVES_TRIED]
            taken = leaves.taken(job.tasks, fits, able)
            steps = {one: self.fabric.step_under_a_leaf(job, *one) for one in set(taken)}
            rounded = {one: round(step_s, 9) for one, step_s in steps.items()}
            ranks = [(rounded[one], idle[leaf]) for leaf, one in zip(able, taken, strict=True)]
            first = min(range(len(able)), key=ranks.__getitem__)
            last = max(reversed(range(len(able))), key=ranks.__getitem__)
            for at in (first,) if first == last else (first, last):
                left_over = idle[able[at]] - job.tasks * job.gpus_per_task
                yield PricedWay(f"under {names[able[at]]}", None, steps[taken[at]], 1, left_over, able[at])
        else:
            wide = sorted([leaf for leaf in leaves.by_name if room[leaf]], key=room.__getitem__, reverse=True)
            counts = _take(job.tasks, fits, (nodes[leaf] for leaf in wide))
            yield self._priced(job, idle, "over the fewest leaves", counts)
            calm = sorted(wide, key=lambda leaf: self.busy.get(names[leaf], 0))
            counts = _take(job.tasks, fits, (nodes[leaf] for leaf in calm))
            yield self._priced(job, idle, "over leaves with idle uplinks", counts)
        packed = packed_nodes(job, free)
        if packed is not None:
            yield self._priced(job, idle, "packed without looking", packed)

    def _priced(self, job: JobRequest, idle: list[int], name: str, counts: _Counts) -> PricedWay:
        """`idle`: free GPUs of each leaf."""
        of, names, most = self.leaves.of, self.leaves.names, 0
        leaves: dict[int, int] = {}  # nodes under each
        for node, count in counts:
            leaf = of[node]
            leaves[leaf] = leaves.get(leaf, 0) + 1
            most = max(most, count)
        left_over = sum([idle[leaf] for leaf in leaves]) - job.tasks * job.gpus_per_task
        named = {names[leaf]: nodes for leaf, nodes in leaves.items()}
        step_s = self.fabric.step_over(job, named, most, job.tasks, self.busy)
        return PricedWay(name, counts, step_s, len(leaves), left_over)


def _take(tasks: int, fits: Ints, leaves: Iterable[Ints]) -> _Counts:
    """Fills the nodes of the leaves in the order given until all tasks have a place."""
    chosen: _Counts = []
    for nodes in leaves:
        for node, room in zip(nodes.tolist(), fits[nodes].tolist(), strict=True):
            if room:
                chosen.append((node, min(room, tasks)))
                tasks -= room
                if tasks <= 0:
                    return chosen
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
        self.by_name = sorted(range(len(self.names)), key=self.names.__getitem__)
        self._idle: tuple[tuple[NodeChanges, int, int], list[int]] | None = None
        self._nodes = np.concatenate(self.nodes)
        self._many = np.array([len(some) for some in self.nodes], dtype=np.int64)
        self._first = self._many.cumsum() - self._many  # of each leaf: its first node in `_nodes`

    def sums(self, of_nodes: Ints) -> list[int]:
        """Of each leaf: the sum over its nodes."""
        found: list[int] = np.bincount(self._of, of_nodes, len(self.nodes)).astype(np.int64).tolist()
        return found

    def idle(self, free: FreeCapacity) -> list[int]:
        """Of each leaf: its free GPUs. To be asked after what fits, so that changes are written down."""
        state = free.changes, free.changes.count, free.gains
        if self._idle is None or self._idle[0] != state:
            self._idle = state, self.sums(free.whole)
        return self._idle[1]

    def taken(self, tasks: int, fits: Ints, leaves: list[int]) -> list[tuple[int, int]]:
        """Of each of these leaves, which have room: the nodes that `_take` fills there, and the most tasks that one
        of them gets."""
        if len(leaves) <= _FEW_LEAVES:
            counts = [[count for _, count in _take(tasks, fits, [self.nodes[leaf]])] for leaf in leaves]
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


class TopologyPlacers:
    """Placers for the snapshots of one cluster after another: the fabric is worked out once."""

    def __init__(self) -> None:
        self._index: object = None
        self._known: tuple[LeafFabric, Leaves] | None = None

    def __call__(self, snapshot: Snapshot) -> TopologyPlacer:
        if self._known is None or self._index is not snapshot.free.index:  # the same for all of a cluster
            self._index = snapshot.free.index
            self._known = leaf_fabric(snapshot.nodes), Leaves(snapshot.nodes)
        fabric, leaves = self._known
        return TopologyPlacer(fabric, leaves, uplinks_of(fabric, snapshot.running).busy)
