"""What a healthy machine would reach: the GPUs and network cards that a text names, and the planner's network model
for them."""

import re
from dataclasses import dataclass, replace
from typing import cast

from cumulo.collectives.decide.schedule import busbw_factor
from cumulo.diagnose.diagnosis import table
from cumulo.plan.network.collectives import Network, collective_s
from cumulo.plan.network.lines import Kind
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster
from cumulo.spec.device import Node

_GENERATIONS = {"xdr": 800.0, "ndr": 400.0, "ndr200": 200.0, "hdr": 200.0, "hdr100": 100.0, "edr": 100.0}
# A node's cards: "8x400G", "8 x 200 Gb/s", "8x NDR"; and what NCCL prints of each of them.
_CARDS = re.compile(
    r"\b(\d{1,2})\s*[x×]\s*(?:(\d{2,3})\s*-?\s*G(?:b|bE|bit|bps|b/s|bit/s)?|(NDR200|NDR|XDR|HDR100|HDR|EDR))\b",
    re.I,
)
_LOGGED_CARD = re.compile(r"NET/IB\s*:\s*\[(\d+)\]\s*[\w.-]+:\S+.{0,200}?\bspeed=(\d+)")
_PORT = re.compile(
    r"\b[Rr]ate\s*:\s*(\d+)|\b(?:rate|speed)\s*:\s*(\d+)\s*Gb|\b(\d{2,3})\s?G(?:b|bE|bit/s|b/s|bps)?\b"
)
_PORT_GBPS = (10.0, 25.0, 40.0, 50.0, 56.0, 100.0, 200.0, 400.0, 800.0)
# Collectives that the planner has no lines for, and those that load the same links as much.
_LIKE_KIND = {
    "reduce": "broadcast",
    "gather": "all_to_all",
    "scatter": "all_to_all",
    "hypercube": "all_gather",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A group of GPUs: what their collectives should reach."""

    node: Node
    network: Network
    ranks: int
    nodes: int
    card_gbps: float  # of each GPU
    stated: bool  # the text says what network there is

    def busbw(self, operation: str, size_bytes: float, best: bool = False) -> float:
        """GB/s that a healthy run reaches at least; `best`: with the algorithm that suits it best.

        Between nodes that is a ring's rate: trees do better between two nodes only."""
        group, kind = self.network.group(self.ranks), _LIKE_KIND.get(operation, operation)
        seconds = collective_s(cast(Kind, kind), size_bytes, group)
        if self.nodes > 1 and not best and self.ranks > self.node.scale_up_gpus:
            rings = [one for one in group.lines[cast(Kind, kind)] if one.algorithm == "ring"]
            seconds = max(seconds, min((one.seconds(size_bytes) for one in rings), default=seconds))
        return size_bytes / seconds * busbw_factor(operation, self.ranks) / 1e9

    @property
    def has_nvlink(self) -> bool:
        return not self.node.device.link_kind.startswith("pcie")


def machine_of(device: str, text: str, ranks: int, nodes: int, link: str) -> Machine | None:
    """The machine whose GPUs `device` names and whose network `text` names; None: the GPUs are not known here."""
    near = max(1, ranks // max(1, nodes))
    node = node_of(device)
    if node is None or ranks < 2:
        return None
    stated = card_gbps_of(text, near)
    if stated is not None:
        node = replace(node, nic_bytes_per_s=stated * 1e9 / 8)
    if nodes > 1 and near < node.gpus:
        node = replace(node, gpus=near, scale_up_gpus=near)
    efa = bool(re.search(r"\befa\b|libfabric", text, re.I))
    fabric = catalog.fabric("ethernet" if efa else "rail-roce" if link == "RoCE" else "rail-infiniband")
    if efa:
        fabric = replace(fabric, oversubscription=(1.0,), latency_s=22e-6)
    gpus = nodes * node.gpus if nodes > 1 else ranks
    card_gbps = node.nic_bytes_per_s * 8 / 1e9
    return Machine(node, Network(Cluster(node, gpus, fabric)), ranks, nodes, card_gbps, stated is not None)


def node_of(text: str) -> Node | None:
    for gpu in table("machines.yaml")["gpus"]:
        if re.search(gpu["pattern"], text, re.I):
            node = catalog.node(gpu["like"])
            own = {name: gpu[name] for name in ("name", "link_bytes_per_s") if name in gpu}
            card = gpu.get("nic_bytes_per_s", node.nic_bytes_per_s)
            return replace(node, device=replace(node.device, **own), nic_bytes_per_s=card)
    named = _instance(text)
    return node_of(named[0]) if named else None


def card_gbps_of(text: str, gpus: int) -> float | None:
    """Gbit/s of network for each of a node's `gpus`, where the text states it."""
    stated = [int(cards) * (float(rate) if rate else _GENERATIONS[name.lower()])
              for cards, rate, name in _CARDS.findall(text)]  # fmt: skip
    if stated:
        return max(stated) / gpus
    if logged := {number: int(megabits) / 1e3 for number, megabits in _LOGGED_CARD.findall(text)}:
        return sum(logged.values()) / gpus
    named = _instance(text)
    return named[1] if named else None


def port_gbps_of(text: str) -> float | None:
    """The fastest rate of a port that the text states."""
    rates = [float(first or second or third) for first, second, third in _PORT.findall(text)]
    rates += [_GENERATIONS[name.lower()] for name in re.findall(r"\b(XDR|NDR200|NDR|HDR100|HDR|EDR)\b", text)]
    return max((rate for rate in rates if rate in _PORT_GBPS), default=None)


def _instance(text: str) -> tuple[str, float] | None:
    for one in table("machines.yaml")["instances"]:
        if re.search(rf"\b(?:{one['pattern']})\b", text, re.I):
            return one["gpu"], one["gbps"]
    return None
