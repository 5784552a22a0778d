"""What a healthy machine would reach: the GPUs and network cards that a text names, and the planner's network model
for them."""

import re
from dataclasses import dataclass, replace
from typing import cast

from cumulo.collectives.decide.schedule import busbw_factor
from cumulo.plan.network.check import published_runs
from cumulo.plan.network.collectives import Network, collective_s
from cumulo.plan.network.lines import Kind
from cumulo.plan.network.profile import network_constants
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster
from cumulo.spec.device import Node

# GPUs as drivers print them, the first that fits: a node of the catalogue, and for GPUs that the catalogue lacks
# the name, the rate of their links each way and the network of each GPU (bytes/s) that differ from that node's.
_NODES: tuple[tuple[str, str, str, float | None, float | None], ...] = (
    (r"\bA100[- ]?(?:80GB |40GB )?PCI", "l40s-server", "a100-pcie", 32e9, 25e9),
    (r"\bH20\b", "dgx-h100", "h20", 450e9, None),
    (r"\bV100[- ]?(?:PCI|FHHL)", "l40s-server", "v100-pcie", 16e9, 6.25e9),
    # Two rings of three NVLinks each way round, of which 130 GB/s arrive on 8 GPUs.
    (r"\bV100", "dgx-a100", "v100", 182e9, 6.25e9),
    (r"\bMI325X", "mi300x-server", "mi325x", None, None),
    (r"\bMI(?:350|355)X", "mi300x-server", "mi355x", 538e9, None),
    (r"\bMI250X?|\bMI210", "mi300x-server", "mi250", 175e9, 12.5e9),
    (r"RTX PRO 6000|RTX 6000 Blackwell", "l40s-server", "rtx-pro-6000", 64e9, None),
    (r"\b(?:L4|A10G)\b", "l40s-server", "pcie-x8-gpu", 16e9, None),
    (r"\b(?:L40|L20|A40|A10|A16|A30|RTX A[456]000|RTX 6000 Ada|RTX 30[6789]0|RTX 40[678]0|A6000)\b",
     "l40s-server", "pcie-gpu", 32e9, None),
    (r"\bT4\b|RTX (?:20[78]0|[568]000)\b|TITAN (?:RTX|V)|Quadro", "l40s-server", "pcie3-gpu", 16e9, None),
    (r"H100.{0,9}PCIe", "h100-pcie-server", "", None, None),
    (r"H[12]00 NVL", "h100-nvl-server", "", None, None),
    (r"GB300", "gb300-nvl72", "", None, None),
    (r"GB200", "gb200-nvl72", "", None, None),
    (r"B300", "dgx-b300", "", None, None),
    (r"B200", "dgx-b200", "", None, None),
    (r"H200", "dgx-h200", "", None, None),
    (r"H100", "dgx-h100", "", None, None),
    (r"H800", "hgx-h800", "", None, None),
    (r"A800", "hgx-a800", "", None, None),
    (r"A100.{0,9}40GB", "dgx-a100-40gb", "", None, None),
    (r"A100", "dgx-a100", "", None, None),
    (r"MI300X", "mi300x-server", "", None, None),
    (r"L40S", "l40s-server", "", None, None),
    (r"RTX 4090", "rtx-4090-workstation", "", None, None),
    (r"RTX 5090", "rtx-5090-workstation", "", None, None),
)  # fmt: skip
# Clouds' machines: the GPU, and Gbit/s of network for each.
_INSTANCES = (
    (r"p3dn", "V100", 12.5),
    (r"p4de", "A100", 50.0),
    (r"p4d", "A100 40GB", 50.0),
    (r"p5en|p5e", "H200", 400.0),
    (r"p5", "H100", 400.0),
    (r"p6-b200", "B200", 400.0),
    (r"ND96asr\w*", "A100 40GB", 200.0),
    (r"ND96amsr\w*|NDm_A100_v4", "A100", 200.0),
    (r"ND96isr_H100\w*|ND_?H100_v5", "H100", 400.0),
    (r"ND96isr_H200\w*|ND_?H200_v5", "H200", 400.0),
    (r"a2-ultragpu-8g|a2-highgpu-8g", "A100", 12.5),
    (r"a3-highgpu-8g", "H100", 100.0),
    (r"a3-megagpu-8g", "H100", 200.0),
    (r"a3-ultragpu-8g", "H200", 400.0),
    (r"a4-highgpu-8g", "B200", 400.0),
    (r"BM\.GPU4\.8|BM\.GPU\.B4\.8|BM\.GPU\.A100-v2\.8", "A100", 200.0),
    (r"BM\.GPU\.H100\.8", "H100", 400.0),
    (r"BM\.GPU\.MI300X\.8", "MI300X", 400.0),
)
_GENERATIONS = {"xdr": 800.0, "ndr": 400.0, "ndr200": 200.0, "hdr": 200.0, "hdr100": 100.0, "edr": 100.0}
# A node's cards: "8x400G", "8 x 200 Gb/s", "8x NDR"; and what NCCL prints of each of them.
_CARDS = re.compile(
    r"\b(\d{1,2})\s*[x×]\s*(?:(\d{2,3})\s*-?\s*G(?:b|bE|bit|bps|b/s|bit/s)?|(NDR200|NDR|XDR|HDR100|HDR|EDR))\b",
    re.I,
)
_LOGGED_CARD = re.compile(r"NET/IB\s*:\s*\[(\d+)\]\s*[\w.-]+:\S+.*?\bspeed=(\d+)")
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

    @property
    def has_nvlink(self) -> bool:
        return not self.node.device.link_kind.startswith("pcie")


def machine_of(device: str, text: str, ranks: int, nodes: int, link: str) -> Machine | None:
    """The machine whose GPUs `device` names and whose network `text` names; None: the GPUs are not known here."""
    near = max(1, ranks // max(1, nodes))
    node = node_of(device)
    if node is None or ranks < 2:
        return None
    if node.device.link_kind == "infinity-fabric" and 1 < near < node.gpus:
        # Each GPU has one link to each other one, so that a few of them use a few links.
        rate = node.device.link_bytes_per_s * (near - 1) / (node.gpus - 1)
        node = replace(node, device=replace(node.device, link_bytes_per_s=rate))
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
    for pattern, like, name, rate, card in _NODES:
        if re.search(pattern, text, re.I):
            node = catalog.node(like)
            if not name:
                return node
            device = replace(node.device, name=name, link_bytes_per_s=rate or node.device.link_bytes_per_s)
            return replace(node, device=device, nic_bytes_per_s=card or node.nic_bytes_per_s)
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
    found = (one for one in _INSTANCES if re.search(rf"\b(?:{one[0]})\b", text, re.I))
    return next(((gpu, gbps) for _, gpu, gbps in found), None)


def nearest_published(machine: Machine) -> str | None:
    """The published run of this device whose ranks are nearest, as a sentence."""
    near = []
    for run in published_runs().values():
        device = catalog.node(run["node"]).device
        if device.generation == machine.node.device.generation and run["times_us"]:
            other = device.name != machine.node.device.name
            near.append((abs(run["ranks"] - machine.ranks), other, run))
    if not near:
        return None
    _, _, run = min(near, key=lambda one: one[:2])
    size, ranks = max(run["times_us"]), run["ranks"]
    busbw = size / run["times_us"][size] / 1e3 * busbw_factor("all_reduce", ranks)
    return (
        f"{run['run']}, {ranks} ranks, all_reduce of {size / 2**30:g} GiB: {busbw:.0f} GB/s ({run['source']})"
    )
