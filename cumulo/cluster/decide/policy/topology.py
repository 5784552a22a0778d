"""Topology-aware placement: every way a gang could lie under the leaf switches is priced by what it does to the
job's step, and the fastest is taken; among equals the one that leaves the most whole leaves free.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cumulo.cluster.decide.fit import AbleNode, pack_gang, task_places
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.policy.leaf_room import Counts, FewNodes, LeafRoom, Leaves, leaf_room
from cumulo.cluster.decide.snapshot import Snapshot
from cumulo.cluster.decide.step_time import LeafFabric, leaf_fabric, uplinks_of

_MOST_LEAVES_TRIED = 32


class PricedWay(NamedTuple):
    """One way to place a gang, with its price."""

    name: str
    counts: Counts | None  # None: under the leaf of this number, found when it is the best
    step_s: float
    leaves: int
    left_over: int  # free GPUs that stay on the leaves it takes: fewer is tidier
    leaf: int = -1


@dataclass
class TopologyPlacer:
    """A placer for one snapshot. `why` says for each job that it placed between which ways it chose."""

    fabric: LeafFabric
    leaves: Leaves
    # Jobs on the uplinks of each leaf, with those that this decision starts and without those that it stops.
    busy: Mapping[str, int]
    why: dict[str, str] = field(default_factory=dict)

    def __call__(self, job: JobRequest, free: FreeCapacity) -> tuple[TaskPlace, ...] | None:
        if self.packs(job):
            return pack_gang(job, free)
        room = leaf_room(job, free, self.leaves)
        return None if room is None else task_places(job, free, self._best(job, room))

    def nodes_then(
        self, job: JobRequest, free: FreeCapacity, able: list[AbleNode], gained: Mapping[int, int]
    ) -> Counts:
        """As `NodesThen` has it."""
        of, of_leaf = self.leaves.of, dict[int, int]()
        for node, gpus in gained.items():
            of_leaf[of[node]] = of_leaf.get(of[node], 0) + gpus
        return self._best(job, FewNodes(job, able, self.leaves, self.leaves.idle(free), of_leaf))

    def _best(self, job: JobRequest, room: LeafRoom) -> Counts:
        found = list(self._ways(job, room))
        found.sort(key=lambda one: (round(one.step_s, 9), one.leaves, one.left_over))
        best, worst = found[0], found[-1]
        self.why[job.job_id] = f"{best.name}: a step of {1e3 * best.step_s:.4g} ms" + (
            f"; {worst.name} would take {1e3 * worst.step_s:.4g} ms" if worst.step_s > best.step_s else ""
        )
        return room.filled(job.tasks, [best.leaf]) if best.counts is None else best.counts

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

    def _ways(self, job: JobRequest, found: LeafRoom) -> Iterator[PricedWay]:
        """Under the best and the worst leaf that has room; over as few leaves as possible; over the leaves with
        idle uplinks; packed without looking."""
        names, room, tasks = self.leaves.names, found.room, job.tasks
        able = sorted([(some, leaf) for leaf, some in room.items() if some >= tasks])
        if able:
            tried = [leaf for _, leaf in able[:_MOST_LEAVES_TRIED]]
            taken = found.taken(tasks, tried)
            steps = {one: self.fabric.step_under_a_leaf(job, *one) for one in set(taken)}
            rounded = {one: round(step_s, 9) for one, step_s in steps.items()}
            ranks = [(rounded[one], found.idle(leaf)) for leaf, one in zip(tried, taken, strict=True)]
            first = ranks.index(min(ranks))
            last = len(ranks) - 1 - ranks[::-1].index(max(ranks))
            for at in (first,) if first == last else (first, last):
                left_over = ranks[at][1] - tasks * job.gpus_per_task
                yield PricedWay(f"under {names[tried[at]]}", None, steps[taken[at]], 1, left_over, tried[at])
        else:
            rank = self.leaves.name_rank
            wide = sorted(room, key=lambda leaf: (-room[leaf], rank[leaf]))
            yield self._priced(job, found, "over the fewest leaves", found.filled(tasks, wide))
            calm = sorted(wide, key=lambda leaf: self.busy.get(names[leaf], 0))
            yield self._priced(job, found, "over leaves with idle uplinks", found.filled(tasks, calm))
        yield self._priced(job, found, "packed without looking", found.packed())

    def _priced(self, job: JobRequest, found: LeafRoom, name: str, counts: Counts) -> PricedWay:
        of, names, most = self.leaves.of, self.leaves.names, 0
        leaves: dict[int, int] = {}  # nodes under each
        for node, count in counts:
            leaf = of[node]
            leaves[leaf] = leaves.get(leaf, 0) + 1
            most = max(most, count)
        left_over = sum([found.idle(leaf) for leaf in leaves]) - job.tasks * job.gpus_per_task
        named = {names[leaf]: nodes for leaf, nodes in leaves.items()}
        step_s = self.fabric.step_over(job, named, most, job.tasks, self.busy)
        return PricedWay(name, counts, step_s, len(leaves), left_over)


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
