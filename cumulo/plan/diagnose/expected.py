"""What a healthy machine would reach: the planner's network model for the device and network that a text
names, and the nearest published run. `diagnose` calls it."""

import re
from dataclasses import dataclass, replace
from typing import cast

from cumulo.plan.network.check import published_runs
from cumulo.plan.network.collectives import Network, collective_s
from cumulo.plan.network.lines import Kind
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster
from cumulo.spec.device import Node

# Names as drivers print them, the first that fits; PCIe boards before their SXM sisters.
_NODES = (
    (r"H100.*PCIe|H100 PCIe", "h100-pcie-server"),
    (r"H100 NVL|H200 NVL", "h100-nvl-server"),
    (r"GB300", "gb300-nvl72"),
    (r"GB200", "gb200-nvl72"),
    (r"B300", "dgx-b300"),
    (r"B200", "dgx-b200"),
    (r"H200", "dgx-h200"),
    (r"H100|HGX H100", "dgx-h100"),
    (r"H800", "hgx-h800"),
    (r"A100.*40GB", "dgx-a100-40gb"),
    (r"A100.*SXM|A100", "dgx-a100"),
    (r"MI300X", "mi300x-server"),
    (r"L40S", "l40s-server"),
    (r"RTX 4090", "rtx-4090-workstation"),
    (r"RTX 5090", "rtx-5090-workstation"),
)
# GPUs that the planner's catalogue lacks: a node of it that has the same kind of links, and their rate each way.
_LIKE = (
    (r"\bA100[- ]?(?:80GB |40GB )?PCI", "a100-pcie", "l40s-server", 32e9),
    (r"\bA800", "a800", "dgx-a100", 200e9),
    (r"\bH20\b", "h20", "dgx-h100", 450e9),
    (r"\bV100", "v100", "dgx-a100", 150e9),
    (r"\bMI325X", "mi325x", "mi300x-server", None),
    (r"RTX PRO 6000|RTX 6000 Blackwell", "rtx-pro-6000", "l40s-server", 64e9),
    (r"\b(?:L40|L20|L4|A40|A10G?|A30|RTX A6000|RTX 6000 Ada)\b", "pcie-gpu", "l40s-server", 32e9),
    (r"Tesla T4|\bT4\b", "t4", "l40s-server", 16e9),
)
_CARDS = re.compile(
    r"\b(\d{1,2})\s*(?:x|×|\*)\s*(\d{2,3})\s*G(?:b|B|E|bit|bps|b/s)?\b|\b(\d{1,2})\s*(?:x|×)\s*(NDR|HDR|EDR)",
    re.I,
)
_GENERATION = {"ndr": 400.0, "hdr": 200.0, "edr": 100.0}
_INSTANCES = {"p4de": 50.0, "p4d": 50.0, "p5en": 400.0, "p5": 400.0, "p6-b200": 400.0}  # Gbit/s for each GPU


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
        """GB/s that a healthy run reaches at least; `best`: with the algorithm that suits it best."""
        group = self.network.group(self.ranks)
        seconds = collective_s(cast(Kind, operation), size_bytes, group)
        if self.nodes > 1 and not best:  # a ring's rate is enough: trees do better between two nodes only
            rings = [one for one in group.lines[cast(Kind, operation)] if one.algorithm == "ring"]
            seconds = min((one.seconds(size_bytes) for one in rings), default=seconds)
        n = self.ranks
        factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "send_recv": 1.0}.get(
            operation, (n - 1) / n
        )
        return size_bytes / seconds * factor / 1e9

    def latency_us(self, operation: str) -> float:
        return collective_s(cast(Kind, operation), 8, self.network.group(self.ranks)) * 1e6

    @property
    def has_nvlink(self) -> bool:
        return not self.node.device.link_kind.startswith("pcie")


def node_of(text: str) -> Node | None:
    for pattern, name, like, rate in _LIKE:
        if re.search(pattern, text, re.IGNORECASE):
            node = catalog.node(like)
            links = node.device.link_bytes_per_s if rate is None else rate
            return replace(node, device=replace(node.device, name=name, link_bytes_per_s=links))
    for pattern, name in _NODES:
        if re.search(pattern, text, re.IGNORECASE):
            return catalog.node(name)
    return None


def card_gbps_of(text: str, gpus: int) -> float | None:
    """Gbit/s of network for each GPU, where the text states it."""
    best = 0.0
    for count, rate, more, generation in _CARDS.findall(text):
        total = int(count) * float(rate) if count else int(more) * _GENERATION[generation.lower()]
        best = max(best, total)
    if best:
        return best / gpus
    for name, gbps in _INSTANCES.items():
        if re.search(rf"\b{name}\b", text, re.IGNORECASE):
            return gbps
    return None


def expected_of(text: str, ranks: int, nodes: int, device: str, link: str) -> Expected | None:
    node = node_of(device) or node_of(text)
    if node is None or ranks < 2:
        return None
    near = max(1, ranks // max(1, nodes))
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
    busbw = size / run["times_us"][size] / 1e3 * 2 * (n - 1) / n
    return f"{run['run']}, {n} ranks, all_reduce of {size / 2**30:g} GiB: {busbw:.0f} GB/s ({run['source']})"
