"""What a healthy machine would reach: the planner's network model for the device and network that a text
names, and the nearest published run. `diagnose` calls it."""

from dataclasses import dataclass, replace
from typing import cast

from cumulo.base import quick_re as re
from cumulo.collectives.decide.schedule import busbw_factor
from cumulo.plan.diagnose.machine_names import bridged_node, card_gbps_of, node_of
from cumulo.plan.network.check import published_runs
from cumulo.plan.network.collectives import Network, collective_s
from cumulo.plan.network.lines import Kind
from cumulo.plan.network.profile import network_constants
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster
from cumulo.spec.device import Node

# Collectives that the planner has no lines for, and those that load the same links as much.
_LIKE_KIND = {
    "reduce": "broadcast",
    "gather": "all_to_all",
    "scatter": "all_to_all",
    "hypercube": "all_gather",
}


@dataclass(frozen=True, slots=True)
class Expected:
    """Of a group of GPUs: what their collectives should reach."""

    node: Node
    network: Network
    ranks: int
    nodes: int
    card_gbps: float  # of each GPU
    stated: bool  # the text says what network there is

    def busbw(self, operation: str, size_bytes: float, best: bool = False) -> float:
        """GB/s that a healthy run reaches at least; `best`: with the algorithm that suits it best.

        Between nodes that is a ring's rate, or what the cards carry: trees do better between two nodes only."""
        group, kind = self.network.group(self.ranks), _LIKE_KIND.get(operation, operation)
        seconds = collective_s(cast(Kind, kind), size_bytes, group)
        if self.nodes > 1 and not best and self.ranks > self.node.scale_up_gpus:
            rings = [one for one in group.lines[cast(Kind, kind)] if one.algorithm == "ring"]
            ring_s = min((one.seconds(size_bytes) for one in rings), default=seconds)
            seconds = max(seconds, min(ring_s, self._cards_s(kind, size_bytes, ring_s)))
        return size_bytes / seconds * busbw_factor(operation, self.ranks) / 1e9

    def _cards_s(self, kind: str, size_bytes: float, ring_s: float) -> float:
        """An all-reduce through the cards of a node at their rate; switches that add carry the rest."""
        reach = self.network.group(self.ranks).reach
        if kind != "all_reduce" or not self.network.profile.nvls_bytes_per_s or reach.domains < 2:
            return ring_s
        rate = min(reach.per_domain, network_constants().most_cards) * reach.nic_bytes_per_s
        return size_bytes * busbw_factor(kind, self.ranks) / rate

    def latency_us(self, operation: str) -> float:
        kind = _LIKE_KIND.get(operation, operation)
        return collective_s(cast(Kind, kind), 8, self.network.group(self.ranks)) * 1e6

    @property
    def has_nvlink(self) -> bool:
        return not self.node.device.link_kind.startswith("pcie")


def expected_of(text: str, ranks: int, nodes: int, device: str, link: str) -> Expected | None:
    near = max(1, ranks // max(1, nodes))
    node = (bridged_node(device or text, text) if near == 2 else None) or node_of(device) or node_of(text)
    if node is None or ranks < 2:
        return None
    node = _of_few(node, near)
    stated = card_gbps_of(text, near)
    if stated is not None:
        node = replace(node, nic_bytes_per_s=stated * 1e9 / 8)
    if nodes > 1 and near < node.gpus:
        node = replace(node, gpus=near, scale_up_gpus=near)
    efa = bool(re.search(r"\befa\b|libfabric", text, re.IGNORECASE))
    name = "ethernet" if efa else "rail-roce" if link == "RoCE" else "rail-infiniband"
    fabric = catalog.fabric(name)
    if efa:
        fabric = replace(fabric, oversubscription=(1.0,), latency_s=22e-6)
    gpus = nodes * node.gpus if nodes > 1 else ranks
    return Expected(
        node,
        Network(Cluster(node, gpus, fabric)),
        ranks,
        nodes,
        node.nic_bytes_per_s * 8 / 1e9,
        stated is not None,
    )


def _of_few(node: Node, gpus: int) -> Node:
    """Where each GPU has one link to each other one, as AMD's have, a few of them use a few links."""
    if node.device.link_kind != "infinity-fabric" or not 1 < gpus < node.gpus:
        return node
    rate = node.device.link_bytes_per_s * (gpus - 1) / (node.gpus - 1)
    return replace(node, device=replace(node.device, link_bytes_per_s=rate))


def nearest_published(expected: Expected) -> str | None:
    """The published run of this device whose ranks are nearest, as a sentence."""
    near = []
    for run in published_runs().values():
        node = catalog.node(run["node"])
        if node.device.generation == expected.node.device.generation and run["times_us"]:
            near.append(
                (abs(run["ranks"] - expected.ranks), node.device.name != expected.node.device.name, run)
            )
    if not near:
        return None
    _, _, run = min(near, key=lambda one: one[:2])
    size = max(run["times_us"])
    n = run["ranks"]
    busbw = size / run["times_us"][size] / 1e3 * busbw_factor("all_reduce", n)
    return f"{run['run']}, {n} ranks, all_reduce of {size / 2**30:g} GiB: {busbw:.0f} GB/s ({run['source']})"
