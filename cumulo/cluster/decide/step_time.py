"""What a set of nodes does to a job's step: its collectives, priced by the planner's network model for the way
the gang would lie under the leaf switches, beside the jobs that already cross them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, StepProfile, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.running import RunningView, table_of
from cumulo.plan.network.lines import Kind, Reach, lines
from cumulo.plan.network.profile import network_constants, profile_of
from cumulo.spec.catalog import shipped
from cumulo.spec.cluster import Cluster

_MOST_PRICED = 10_000
_USUAL_DEVICE, _USUAL_FABRIC = "h100-sxm", "fat-tree-roce"


# How a gang lies: its GPUs, those on a node, nodes, by how much uplinks slow down neighbours and an all-to-all, and
# whether it crosses them.
_Lies = tuple[int, int, int, float, float, bool]


@dataclass(frozen=True)
class LeafFabric:
    """Nodes under leaf switches. `oversubscription`: what a leaf's nodes can send over what its uplinks carry."""

    machine: Cluster
    leaf_of: Mapping[str, str]
    oversubscription: float = 2.0
    # Seconds of an all-reduce and of an all-to-all of so many bytes.
    _priced: dict[tuple[float, float, _Lies], tuple[float, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def leaf_cards(self) -> Mapping[str, int]:
        """Network cards under each leaf, one per GPU."""
        counts = Counter(self.leaf_of.values())
        return {leaf: nodes * self.machine.node.gpus for leaf, nodes in counts.items()}

    def crossing(self, places: Iterable[TaskPlace]) -> tuple[str, ...]:
        """The leaves whose uplinks a gang uses; (): it lies under one."""
        leaves = tuple(dict.fromkeys(self.leaf_of[place.node] for place in places))
        return leaves if len(leaves) > 1 else ()

    def step_s(self, job: JobRequest, places: Sequence[TaskPlace], busy: Mapping[str, int]) -> float:
        """Seconds of one step, when the jobs counted in `busy` share the uplinks fairly with this one."""
        return self.step_of(job, Counter(place.node for place in places), busy)

    def step_of(self, job: JobRequest, tasks: Mapping[str, int], busy: Mapping[str, int]) -> float:
        """As `step_s`; `tasks` are those on each node."""
        leaves = Counter(map(self.leaf_of.__getitem__, tasks))
        return self.step_over(job, leaves, max(tasks.values()), sum(tasks.values()), busy)

    def step_over(
        self, job: JobRequest, leaves: Mapping[str, int], most: int, tasks: int, busy: Mapping[str, int]
    ) -> float:
        """As `step_s` of a gang on so many nodes under each leaf, with so many tasks at most on one of them."""
        if job.step is None:
            return 0.0
        gpus, nodes = most * job.gpus_per_task, sum(leaves.values())
        near_loss = far_loss = 1.0
        crosses = len(leaves) > 1
        for leaf, inside in leaves.items() if crosses else ():
            sharing = busy.get(leaf, 0) + 1
            uplinks = self.leaf_cards[leaf] / self.oversubscription / sharing  # cards' worth, for this job
            # A ring leaves the leaf once, on every rail; an all-to-all with all that goes elsewhere.
            near_loss = max(near_loss, gpus / uplinks)
            far_loss = max(far_loss, inside * gpus * (1 - inside / nodes) / uplinks)
        return self._step_s(job.step, (tasks * job.gpus_per_task, gpus, nodes, near_loss, far_loss, crosses))

    def step_under_a_leaf(self, job: JobRequest, nodes: int, most: int) -> float:
        """As `step_s` of a gang on so many nodes under one leaf, with so many tasks at most on one of them."""
        if job.step is None:
            return 0.0
        each = job.gpus_per_task
        return self._step_s(job.step, (job.tasks * each, most * each, nodes, 1.0, 1.0, False))

    def _step_s(self, step: StepProfile, lies: _Lies) -> float:
        key = step.all_reduce_bytes, step.all_to_all_bytes, lies
        known = self._priced.get(key)
        if known is None:
            if len(self._priced) >= _MOST_PRICED:
                self._priced.clear()
            known = self._priced[key] = (
                self._collective_s("all_reduce", step.all_reduce_bytes, lies),
                self._collective_s("all_to_all", step.all_to_all_bytes, lies),
            )
        return step.compute_s + known[0] + known[1]

    def _collective_s(self, kind: Kind, size_bytes: float, lies: _Lies) -> float:
        if not size_bytes:
            return 0.0
        gpus, on_a_node, nodes, near_loss, far_loss, crosses = lies
        fabric, card = self.machine.fabric, self._card
        latency = fabric.latency_s + (2 * fabric.hop_latency_s if crosses else 0.0)
        reach = Reach(gpus, on_a_node, nodes, card / near_loss, card / far_loss, latency)
        profile = profile_of(self.machine.device)
        return min(line.seconds(size_bytes) for line in lines(kind, reach, profile, network_constants()))

    @cached_property
    def _card(self) -> float:
        """Bytes per second of a network card."""
        share = network_constants().transport_share[self.machine.fabric.transport]
        return self.machine.node.nic_bytes_per_s * share


class Uplinks(RunningView):
    """Jobs that exchange data over each leaf's uplinks."""

    def __init__(self, fabric: LeafFabric) -> None:
        self.fabric = fabric
        self.busy: Counter[str] = Counter()

    def add(self, job: RunningJob) -> None:
        if job.request.step is not None:
            self.busy.update(self.fabric.crossing(job.places))

    def remove(self, job: RunningJob) -> None:
        if job.request.step is not None:
            self.busy.subtract(self.fabric.crossing(job.places))


def uplinks_of(fabric: LeafFabric, running: Mapping[str, RunningJob]) -> Uplinks:
    """Kept up to date with the running jobs."""
    return table_of(running).view(("uplinks", id(fabric)), lambda: Uplinks(fabric))


def leaf_fabric(nodes: Sequence[ClusterNode]) -> LeafFabric:
    """The fabric of these nodes: of their device if the catalogue has it, else of 8-GPU H100 nodes on RoCE."""
    catalog = shipped()
    known = nodes[0].device if nodes and nodes[0].device in catalog.tables["devices"] else _USUAL_DEVICE
    machine = catalog.cluster(8, known, fabric=_USUAL_FABRIC)
    return LeafFabric(machine, {node.name: node.leaf for node in nodes}, nodes[0].leaf_oversubscription)
