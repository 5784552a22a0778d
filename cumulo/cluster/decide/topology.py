"""Topology-aware placement: every way a gang could lie under the leaf switches is priced by what it does to the
job's step, and the fastest is taken; among equals the one that leaves the most whole leaves free.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cumulo.cluster.decide.fit import (
    NodeCounts,
    Placer,
    Places,
    fill_nodes,
    pack_gang,
    packed_nodes,
    task_places,
    tasks_that_fit,
)
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, Ints
from cumulo.cluster.decide.snapshot import Snapshot
from cumulo.cluster.decide.step_time import LeafFabric, leaf_fabric

_MOST_LEAVES_TRIED = 32


class PricedWay(NamedTuple):
    """One way to place a gang, with its price."""

    name: str
    counts: NodeCounts
    step_s: float
    leaves: int
    left_over: int  # free GPUs that stay on the leaves it takes: fewer is tidier

    @property
    def rank(self) -> tuple[float, int, int]:
        return round(self.step_s, 9), self.leaves, self.left_over


@dataclass(frozen=True, slots=True)
class _Room:
    """The room for one gang: how many tasks fit on each node and under each leaf, and the free GPUs of each
    leaf."""

    fits: Ints
    by_leaf: Ints
    idle: Ints


class TopologyPlacer(Placer):
    """A placer for one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._ways: dict[str, str] = {}  # of each job that was placed: between which ways it chose

    @cached_property
    def fabric(self) -> LeafFabric:
        return leaf_fabric(self.snapshot.nodes)

    @cached_property
    def busy(self) -> Counter[str]:
        """Jobs on the uplinks of each leaf, with those that the decision starts, without those that it stops."""
        return self.fabric.busy(self.snapshot.running.values())

    @cached_property
    def leaves(self) -> list[str]:
        return list(dict.fromkeys(node.leaf for node in self.snapshot.nodes))

    @cached_property
    def leaf_of(self) -> Ints:
        """For each node: the number of its leaf."""
        numbers = {leaf: number for number, leaf in enumerate(self.leaves)}
        return np.array([numbers[node.leaf] for node in self.snapshot.nodes], dtype=np.int64)

    def places(self, job: JobRequest, free: FreeCapacity) -> Places | None:
        if job.tasks == 1 or not job.gpus_per_task or job.fractional:
            return pack_gang(job, free)  # there is nothing to choose between
        fits = tasks_that_fit(job, free)
        if fits.sum() < job.tasks:
            return None
        room = _Room(fits, self._by_leaf(fits), self._by_leaf(free.whole))
        ways = sorted(self._all_ways(job, free, room), key=lambda way: way.rank)
        best, worst = ways[0], ways[-1]
        self._ways[job.job_id] = f"{best.name}: a step of {1e3 * best.step_s:.4g} ms" + (
            f"; {worst.name} would take {1e3 * worst.step_s:.4g} ms" if worst.step_s > best.step_s else ""
        )
        return task_places(job, free, best.counts)

    def why(self, job: JobRequest) -> str:
        return self._ways.get(job.job_id, "")

    def started(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        """Those that are placed after this gang share the uplinks with it, as they do with the running ones."""
        if job.step is not None:
            self.busy.update(self.fabric.crossing(places))

    def stopped(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        if job.step is not None:
            self.busy.subtract(self.fabric.crossing(places))

    def _by_leaf(self, of_nodes: Ints) -> Ints:
        return np.bincount(self.leaf_of, of_nodes, len(self.leaves)).astype(np.int64)

    def _all_ways(self, job: JobRequest, free: FreeCapacity, room: _Room) -> Iterator[PricedWay]:
        """Under the best and the worst leaf that has room; over as few leaves as possible; over the leaves with
        idle uplinks; packed without looking."""
        tasks, by_leaf, names = job.tasks, room.by_leaf, self.leaves
        able = np.flatnonzero(by_leaf >= tasks)
        if len(able):
            tried = able[np.argsort(by_leaf[able], kind="stable")][:_MOST_LEAVES_TRIED].tolist()
            ways = [self._over(job, room, f"under {names[leaf]}", [leaf]) for leaf in tried]
            yield min(ways, key=lambda way: way.rank)
            yield max(reversed(ways), key=lambda way: way.rank)
        else:
            wide = sorted(np.flatnonzero(by_leaf).tolist(), key=lambda leaf: (-by_leaf[leaf], names[leaf]))
            yield self._over(job, room, "over the fewest leaves", wide)
            calm = sorted(wide, key=lambda leaf: self.busy.get(names[leaf], 0))
            yield self._over(job, room, "over leaves with idle uplinks", calm)
        blind = packed_nodes(job, free, room.fits)
        assert blind is not None  # there is room
        yield self._priced(job, room, "packed without looking", blind)

    def _over(self, job: JobRequest, room: _Room, name: str, leaves: list[int]) -> PricedWay:
        """The nodes of the leaves in the order given, until all tasks have a place."""
        enough = int(np.searchsorted(np.cumsum(room.by_leaf[leaves]), job.tasks)) + 1
        nodes = np.concatenate([np.flatnonzero(self.leaf_of == leaf) for leaf in leaves[:enough]])
        return self._priced(job, room, name, fill_nodes(job.tasks, nodes, room.fits))

    def _priced(self, job: JobRequest, room: _Room, name: str, counts: NodeCounts) -> PricedWay:
        leaves = Counter(self.leaf_of[[node for node, _ in counts]].tolist())
        left_over = sum(int(room.idle[leaf]) for leaf in leaves) - job.tasks * job.gpus_per_task
        named: Mapping[str, int] = {self.leaves[leaf]: nodes for leaf, nodes in leaves.items()}
        step_s = self.fabric.step_over(job, named, max(count for _, count in counts), job.tasks, self.busy)
        return PricedWay(name, counts, step_s, len(leaves), left_over)
