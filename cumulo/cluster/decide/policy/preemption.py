"""Room for a gang by stopping others: node by node, where the least has to stop. Priorities and reclaimed quotas
choose who may be stopped. What could be stopped on each node is kept (`preemptible`), and so is what was found for
each node, so that ten thousand of them are searched in microseconds.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cumulo.cluster.decide.fit import Placer, only_gpus, slots
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob
from cumulo.cluster.decide.node_state import NodeState
from cumulo.cluster.decide.nodes import FreeCapacity, Ints
from cumulo.cluster.decide.policy.preemptible import preemptible_on_nodes
from cumulo.cluster.decide.running import RunningView, jobs_on_nodes, table_of
from cumulo.cluster.decide.snapshot import Snapshot

MORE_NODES = 12  # that are priced, besides one for each missing task
_MOST_PRICED = 200_000  # nodes for which it is kept what was found


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
    columns: Callable[[], Ints]  # what may be stopped, on each node
    may_stop: Callable[[RunningJob, list[RunningJob]], bool]  # a job, besides those that are stopped already
    price: Callable[[RunningJob], tuple[float, ...]]
    # Told of those that stop, node by node: whether it is clear now that it is not worth it.
    too_much: Callable[[list[RunningJob]], bool] | None = None
    # Searches of an equal kind find the same jobs on the same node; None: `may_stop` looks at more than the job.
    kind: Hashable = None
    # So many nodes at most with room for a task more, in the order of `_candidates`, while nobody is stopped yet.
    first_nodes: Callable[[int], list[int]] | None = None
    # After a search that found nothing: as long as nothing starts or ends on these nodes, it finds nothing again
    # among the same first nodes; None: it looked at all nodes.
    looked_at: set[int] | None = None
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
        alone = only_gpus(job) and 2 * job.gpus_per_task > len(free.room) - 1  # no two tasks on one node
        while (missing := job.tasks - slots(job, then)) > 0:
            priced: list[tuple[float, float, int, list[RunningJob]]] = []
            if self.first_nodes is not None and not chosen:
                nodes = self.first_nodes(missing + MORE_NODES)
            else:
                nodes = self._candidates(then, missing, chosen)
            self.looked_at = None if chosen or self.first_nodes is None else set(nodes)
            for node in nodes:
                found = self._priced(node, then, on, chosen, kept)
                if found is not None:
                    priced.append((found[0], found[1], node, found[2]))
            if not priced:
                return None
            touched: set[str] = set()  # by those that stop: what was found for these nodes is old
            priced.sort()  # no two of them are of one node
            later: list[RunningJob] = []  # they stop, and their places are still taken in `then`
            for more, (_, _, node, victims) in enumerate(priced, 1):
                if then.nodes[node].name in touched:
                    victims = self._victims(node, then, on, chosen)
                if self.looked_at is not None:
                    self.looked_at.update([free.index[place.node] for one in victims for place in one.places])
                if self.too_much is not None and self.too_much(victims):
                    return None
                chosen += victims
                later += victims
                for victim in victims:
                    self._stopped.add(victim.job_id)
                    touched.update(place.node for place in victim.places)
                # A task more on each node, and nothing elsewhere: it is clear that they are too few.
                alone = alone and all(len(victim.places) == 1 for victim in victims)
                if alone and more < missing:
                    continue
                then = self._without(later, free, then)
                later = []
                if slots(job, then) >= job.tasks:
                    break
            then = self._without(later, free, then)
        return chosen, then if then is not free else free.copy()

    def _without(self, stopped: list[RunningJob], free: FreeCapacity, then: FreeCapacity) -> FreeCapacity:
        if stopped and then is free:
            then = free.copy()
        for victim in stopped:
            then.release(victim.request, victim.places)
        return then

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
        job, columns = self.job, self.columns()
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
            left = free.milli_left()
            need = np.maximum(0, job.milli_per_task - left)
            able = (left + gpus >= job.milli_per_task) & (free.cpu_milli + cpu >= job.cpu_milli)
            able &= (free.memory_mib + memory >= job.memory_mib) & ((gpus > 0) | (cpu > 0) | (memory > 0))
        able &= free.ready
        if job.devices:
            able &= free.device_mask(job.devices)
        found = np.flatnonzero(able)
        found = found[np.argsort(need[found], kind="stable")]
        return [int(node) for node in found[: missing + MORE_NODES]]

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
        state = NodeState(self.job, free, node)
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


def fits(job: JobRequest, free: FreeCapacity, place: Placer) -> bool:
    """Every placer finds places for a gang of whole GPUs where there are enough: counting them will do."""
    return slots(job, free) >= job.tasks if only_gpus(job) else place(job, free) is not None


def watch_running(snapshot: Snapshot, kind: Callable[[RunningJob], Hashable]) -> None:
    """What a search for room reads is kept from the first decision on, while few jobs run: built later, among
    thousands of them, it would make that decision slow."""
    preemptible_on_nodes(snapshot, kind)
    jobs_on_nodes(snapshot.running)
