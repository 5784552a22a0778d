"""Topology-aware placement: every way a gang could lie under the leaf switches is priced by what it does to the
job's step, and the fastest is taken; among equals the one that leaves the most whole leaves free.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cumulo.cluster.decide.fit import pack_gang, task_places, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, Ints
from cumulo.cluster.decide.snapshot import Snapshot
from cumulo.cluster.decide.step_time import LeafFabric, leaf_fabric, uplinks_of

_MOST_LEAVES_TRIED = 32


@dataclass(frozen=True, slots=True)
class PricedPlacement:
    """One way to place a gang, with its price."""

    name: str
    places: tuple[TaskPlace, ...]
    step_s: float
    leaves: int
    left_over: int  # free GPUs that stay on the leaves it takes: fewer is tidier


@dataclass
class TopologyPlacer:
    """A placer for one snapshot. `candidates` keeps what was considered for each job, for those who ask why."""

    fabric: LeafFabric
    leaves: "Leaves"
    busy: Counter[str]
    candidates: dict[str, list[PricedPlacement]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def __call__(self, job: JobRequest, free: FreeCapacity) -> tuple[TaskPlace, ...] | None:
        if job.tasks == 1 or not job.gpus_per_task or job.fractional:
            return pack_gang(job, free)
        fits = tasks_that_fit(job, free)
        if int(fits.sum()) < job.tasks:
            return None
        found = [self._priced(job, free, name, counts) for name, counts in self._ways(job, fits, free)]
        found.sort(key=lambda one: (round(one.step_s, 9), one.leaves, one.left_over))
        self.candidates[job.job_id] = found
        best, worst = found[0], found[-1]
        self.why[job.job_id] = f"{best.name}: a step of {1e3 * best.step_s:.4g} ms" + (
            f"; {worst.name} would take {1e3 * worst.step_s:.4g} ms" if worst.step_s > best.step_s else ""
        )
        self.busy.update(self.fabric.crossing(best.places))
        return best.places

    def _priced(
        self, job: JobRequest, free: FreeCapacity, name: str, counts: list[tuple[int, int]]
    ) -> PricedPlacement:
        places = task_places(job, free, counts)
        leaves = {self.fabric.leaf_of[place.node] for place in places}
        idle = (
            sum(int(free.whole[self.leaves.nodes[leaf]].sum()) for leaf in leaves)
            - job.tasks * job.gpus_per_task
        )
        return PricedPlacement(name, places, self.fabric.step_s(job, places, self.busy), len(leaves), idle)

    def _ways(
        self, job: JobRequest, fits: Ints, free: FreeCapacity
    ) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Under each leaf that has room; over as few leaves as possible; over the leaves with idle uplinks;
        packed without looking."""
        by_leaf = self.leaves.nodes
        room = dict(zip(by_leaf, self.leaves.sums(fits), strict=True))
        able = sorted((leaf for leaf in room if room[leaf] >= job.tasks), key=lambda leaf: room[leaf])
        for leaf in able[:_MOST_LEAVES_TRIED]:
            yield f"under {leaf}", _take(job.tasks, fits, by_leaf[leaf], free)
        if not able:
            wide = sorted((leaf for leaf in room if room[leaf]), key=lambda leaf: (-room[leaf], leaf))
            yield (
                "over the fewest leaves",
                _take(job.tasks, fits, [n for leaf in wide for n in by_leaf[leaf]], free),
            )
            idle = sorted(wide, key=lambda leaf: (self.busy.get(leaf, 0), -room[leaf], leaf))
            yield (
                "over leaves with idle uplinks",
                _take(job.tasks, fits, [n for leaf in idle for n in by_leaf[leaf]], free),
            )
        packed = pack_gang(job, free)
        if packed is not None:
            counts = Counter(free.index[place.node] for place in packed)
            yield "packed without looking", list(counts.items())


def _take(tasks: int, fits: Ints, nodes: list[int], free: FreeCapacity) -> list[tuple[int, int]]:
    """Fills nodes in the order given, fuller hosts of a leaf first, until all tasks have a place."""
    chosen: list[tuple[int, int]] = []
    for node in nodes:
        count = min(int(fits[node]), tasks)
        if count:
            chosen.append((node, count))
            tasks -= count
        if not tasks:
            break
    return chosen


class Leaves:
    """The nodes under each leaf switch, by number."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self.nodes: dict[str, list[int]] = {}
        for number, node in enumerate(nodes):
            self.nodes.setdefault(node.leaf, []).append(number)
        numbers = {leaf: number for number, leaf in enumerate(self.nodes)}
        self._leaf_of = np.array([numbers[node.leaf] for node in nodes], dtype=np.int64)

    def sums(self, of_nodes: Ints) -> list[int]:
        """Of each leaf: the sum over its nodes."""
        found: list[int] = np.bincount(self._leaf_of, of_nodes, len(self.nodes)).astype(np.int64).tolist()
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
        return TopologyPlacer(fabric, leaves, Counter(uplinks_of(fabric, snapshot.running).busy))
