"""Topology-aware placement: every way a gang could lie under the leaf switches is priced by what it does to the
job's step, and the fastest is taken; among equals the one that leaves the most whole leaves free.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cumulo.cluster.decide.fit import pack_gang, packed_nodes, slots, task_places, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, Ints
from cumulo.cluster.decide.snapshot import Snapshot
from cumulo.cluster.decide.step_time import LeafFabric, leaf_fabric, uplinks_of

_MOST_LEAVES_TRIED = 32


_Counts = list[tuple[int, int]]  # nodes by number, and how many tasks each gets


@dataclass(frozen=True, slots=True)
class PricedWay:
    """One way to place a gang, with its price."""

    name: str
    counts: _Counts
    step_s: float
    leaves: int
    left_over: int  # free GPUs that stay on the leaves it takes: fewer is tidier


@dataclass
class TopologyPlacer:
    """A placer for one snapshot. `why` says for each job that it placed between which ways it chose."""

    fabric: LeafFabric
    leaves: "Leaves"
    busy: Counter[str]  # that of the running jobs; never changed
    why: dict[str, str] = field(default_factory=dict)

    def __call__(self, job: JobRequest, free: FreeCapacity) -> tuple[TaskPlace, ...] | None:
        if job.tasks == 1 or not job.gpus_per_task or job.fractional:
            return pack_gang(job, free)
        if slots(job, free) < job.tasks:
            return None
        found = list(self._ways(job, tasks_that_fit(job, free), free))
        found.sort(key=lambda one: (round(one.step_s, 9), one.leaves, one.left_over))
        best, worst = found[0], found[-1]
        self.why[job.job_id] = f"{best.name}: a step of {1e3 * best.step_s:.4g} ms" + (
            f"; {worst.name} would take {1e3 * worst.step_s:.4g} ms" if worst.step_s > best.step_s else ""
        )
        places = task_places(job, free, best.counts)
        crossed = self.fabric.crossing(places)
        if crossed:
            self.busy = Counter(self.busy)
            self.busy.update(crossed)
        return places

    def _ways(self, job: JobRequest, fits: Ints, free: FreeCapacity) -> Iterator[PricedWay]:
        """Under each leaf that has room; over as few leaves as possible; over the leaves with idle uplinks;
        packed without looking."""
        by_leaf, rooms = self.leaves.nodes, self.leaves.sums(fits)
        idle = self.leaves.sums(free.whole)
        room = dict(zip(by_leaf, rooms, strict=True))
        able = sorted((leaf for leaf in room if room[leaf] >= job.tasks), key=lambda leaf: room[leaf])
        inside: dict[
            tuple[int, int], float
        ] = {}  # under one leaf only the nodes and the most tasks on one count
        for leaf in able[:_MOST_LEAVES_TRIED]:
            counts = _take(job.tasks, fits, [by_leaf[leaf]])
            key = len(counts), max(count for _, count in counts)
            if key not in inside:
                inside[key] = self._step_s(job, free, counts)
            left_over = idle[self.leaves.of[counts[0][0]]] - job.tasks * job.gpus_per_task
            yield PricedWay(f"under {leaf}", counts, inside[key], 1, left_over)
        if not able:
            wide = sorted((leaf for leaf in room if room[leaf]), key=lambda leaf: (-room[leaf], leaf))
            counts = _take(job.tasks, fits, (by_leaf[leaf] for leaf in wide))
            yield self._priced(job, free, idle, "over the fewest leaves", counts)
            calm = sorted(wide, key=lambda leaf: (self.busy.get(leaf, 0), -room[leaf], leaf))
            counts = _take(job.tasks, fits, (by_leaf[leaf] for leaf in calm))
            yield self._priced(job, free, idle, "over leaves with idle uplinks", counts)
        packed = packed_nodes(job, free)
        if packed is not None:
            yield self._priced(job, free, idle, "packed without looking", packed)

    def _priced(
        self, job: JobRequest, free: FreeCapacity, idle: list[int], name: str, counts: _Counts
    ) -> PricedWay:
        """`idle`: free GPUs of each leaf."""
        leaves = {self.leaves.of[node] for node, _ in counts}
        left_over = sum(idle[leaf] for leaf in leaves) - job.tasks * job.gpus_per_task
        return PricedWay(name, counts, self._step_s(job, free, counts), len(leaves), left_over)

    def _step_s(self, job: JobRequest, free: FreeCapacity, counts: _Counts) -> float:
        tasks = {free.nodes[node].name: count for node, count in counts}
        return self.fabric.step_of(job, tasks, self.busy)


def _take(tasks: int, fits: Ints, leaves: Iterable[list[int]]) -> _Counts:
    """Fills the nodes of the leaves in the order given until all tasks have a place."""
    chosen: _Counts = []
    for nodes in leaves:
        for node, room in zip(nodes, fits[nodes].tolist(), strict=True):
            if room:
                chosen.append((node, min(room, tasks)))
                tasks -= room
                if tasks <= 0:
                    return chosen
    return chosen


class Leaves:
    """The nodes under each leaf switch, by number."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self.nodes: dict[str, list[int]] = {}
        for number, node in enumerate(nodes):
            self.nodes.setdefault(node.leaf, []).append(number)
        numbers = {leaf: number for number, leaf in enumerate(self.nodes)}
        self.of = [numbers[node.leaf] for node in nodes]  # of each node: its leaf, by number
        self._of = np.array(self.of, dtype=np.int64)

    def sums(self, of_nodes: Ints) -> list[int]:
        """Of each leaf: the sum over its nodes."""
        found: list[int] = np.bincount(self._of, of_nodes, len(self.nodes)).astype(np.int64).tolist()
        return found


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
