"""What a set of nodes does to a job's step: its collectives, priced by the planner's network model for the way
the gang would lie under the leaf switches, beside the jobs that already cross them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.plan.network.lines import Kind, Reach, lines, network_constants, profile_of
from cumulo.spec.catalog import shipped
from cumulo.spec.cluster import Cluster

_USUAL_DEVICE, _USUAL_FABRIC = "h100-sxm", "fat-tree-roce"


# How a gang lies: its GPUs, those on a node, nodes, by how much uplinks slow down neighbours and an all-to-all, and
# whether it crosses them.
_Lies = tuple[int, int, int, float, float, bool]


@dataclass(frozen=True)
class LeafFabric:
    """Nodes of a device under leaf switches. `oversubscription`: what a leaf's nodes can send over what its
    uplinks carry."""

    device: str
    leaf_of: Mapping[str, str]
    oversubscription: float = 2.0

    @property
    def machine(self) -> Cluster:
        return _machine(self.device)

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
        tasks = Counter(place.node for place in places)
        leaves = Counter(map(self.leaf_of.__getitem__, tasks))
        return self.step_over(job, leaves, max(tasks.values()), len(places), busy)

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
        lies = (tasks * job.gpus_per_task, gpus, nodes, near_loss, far_loss, crosses)
        return job.step.compute_s + _exchange_s(
            self.device, job.step.all_reduce_bytes, job.step.all_to_all_bytes, lies
        )

    def busy(self, running: Iterable[RunningJob]) -> Counter[str]:
        """How many jobs exchange data over each leaf's uplinks."""
        found: Counter[str] = Counter()
        for one in running:
            if one.request.step is not None and len(one.places) > 1:
                found.update(self.crossing(one.places))
        return found


@cache
def _machine(device: str) -> Cluster:
    return shipped().cluster(8, device, fabric=_USUAL_FABRIC)


@lru_cache(maxsize=10_000)
def _exchange_s(device: str, all_reduce_bytes: float, all_to_all_bytes: float, lies: _Lies) -> float:
    """Seconds of the collectives of one step."""
    return _collective_s(device, "all_reduce", all_reduce_bytes, lies) + _collective_s(
        device, "all_to_all", all_to_all_bytes, lies
    )


def _collective_s(device: str, kind: Kind, size_bytes: float, lies: _Lies) -> float:
    if not size_bytes:
        return 0.0
    gpus, on_a_node, nodes, near_loss, far_loss, crosses = lies
    machine, constants = _machine(device), network_constants()
    fabric = machine.fabric
    card = machine.node.nic_bytes_per_s * constants.transport_share[fabric.transport]
    latency = fabric.latency_s + (2 * fabric.hop_latency_s if crosses else 0.0)
    reach = Reach(gpus, on_a_node, nodes, card / near_loss, card / far_loss, latency)
    return min(line.seconds(size_bytes) for line in lines(kind, reach, profile_of(machine.device), constants))


def leaf_fabric(nodes: Sequence[ClusterNode]) -> LeafFabric:
    """The fabric of these nodes: of their device if the catalogue has it, else of 8-GPU H100 nodes on RoCE."""
    known = nodes[0].device if nodes and nodes[0].device in shipped().tables["devices"] else _USUAL_DEVICE
    return LeafFabric(known, {node.name: node.leaf for node in nodes}, nodes[0].leaf_oversubscription)
