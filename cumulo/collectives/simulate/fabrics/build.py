"""Fabrics link by link: from the description that the planner uses, and joined sites."""

from collections.abc import Sequence

import numpy as np

from cumulo.collectives.simulate.fabrics.clos import ClosGraph, ClosTier
from cumulo.collectives.simulate.fabrics.dragonfly import DragonflyGraph
from cumulo.collectives.simulate.fabrics.links import FabricGraph, Ints, LinkRates, LinkTable, Routing
from cumulo.errors import ConfigError
from cumulo.spec.cluster import Cluster, tiers_of

FABRIC_SCALE_UP_LATENCY_S = (
    0.8e-6  # a step from GPU to GPU, as measured on Hopper (plan/data/collectives.yaml)
)


def fabric_graph(cluster: Cluster, pod_gpus: int | None = None) -> FabricGraph:
    """`pod_gpus`: GPUs below one spine layer, where they are fewer than its ports allow."""
    node, fabric = cluster.node, cluster.fabric
    rates = LinkRates(
        node.nic_bytes_per_s,
        node.device.link_bytes_per_s,
        fabric.latency_s,
        fabric.hop_latency_s,
        FABRIC_SCALE_UP_LATENCY_S,
    )
    if fabric.kind == "dragonfly":
        return DragonflyGraph(cluster.nodes * node.gpus, node.scale_up_gpus, fabric.switch_ports, rates)
    tiers = tiers_of(fabric, node, cluster.nodes)
    each = 1 if fabric.kind == "rail" else node.gpus
    found = [ClosTier(tier.name, tier.nodes * each, tier.up_ports, rates.card_bytes_per_s) for tier in tiers]
    if pod_gpus is not None:
        found = _with_pods(
            found, pod_gpus // node.gpus * each, cluster.nodes * each, fabric.oversubscription_of(1)
        )
    return ClosGraph(cluster.nodes, node.gpus, node.scale_up_gpus, fabric.kind == "rail", found, rates)


def _with_pods(tiers: list[ClosTier], pod: int, cards: int, ratio: float) -> list[ClosTier]:
    """Leaf, a spine layer that joins `pod` cards, and one core above all pods, `ratio` : 1 oversubscribed."""
    leaf = tiers[0]
    if pod < leaf.cards or pod % leaf.cards:
        raise ConfigError(
            f"a pod of {pod:,} cards is not made of leaves of {leaf.cards}; give a multiple of {leaf.cards}"
        )
    uplinks = leaf.uplinks or leaf.cards
    wanted = pod / ratio / uplinks  # links up from each spine switch
    ports = max(1, round(wanted))
    rate = leaf.bytes_per_s * wanted / ports  # so that the pod's bandwidth is exact where ports do not divide
    return [
        ClosTier("leaf", leaf.cards, uplinks, leaf.bytes_per_s),
        ClosTier("spine", pod, ports, rate),
        ClosTier("core", max(pod, cards), 0, leaf.bytes_per_s),
    ]


class JoinedSites(FabricGraph):
    """Two or more fabrics joined by long links: datacentres, each a whole fabric, and between each pair one bundle
    with its own bandwidth and delay. Ranks are numbered site after site."""

    def __init__(self, sites: Sequence[FabricGraph], bytes_per_s: float, delay_s: float) -> None:
        self.sites = tuple(sites)
        self.ranks = sum(site.ranks for site in sites)
        self.starts = np.cumsum([0, *(site.ranks for site in sites)])
        self.links = LinkTable()
        self._firsts = [self._append(number, site) for number, site in enumerate(self.sites)]
        count = len(self.sites)
        self._long = self.links.add(
            count * count, bytes_per_s, delay_s, "between sites",
            lambda i: f"site {i // count} → site {i % count}",
        )  # fmt: skip

    def _append(self, number: int, site: FabricGraph) -> int:
        first = len(self.links.capacity)
        for tier in site.links.tiers:
            if tier not in self.links.tiers:
                self.links.tiers.append(tier)
        self.links.capacity = np.concatenate([self.links.capacity, site.links.capacity])
        self.links.latency = np.concatenate([self.links.latency, site.links.latency])
        tiers = np.array([self.links.tiers.index(tier) for tier in site.links.tiers])
        self.links.tier = np.concatenate([self.links.tier, tiers[site.links.tier]])
        self.links._blocks.append((first, lambda i: f"site {number}: {site.links.name(i)}"))
        return first

    def paths(self, source: Ints, target: Ints, keys: Ints, routing: Routing) -> Ints:
        """Between sites a message leaves by rank 0's gateway card and enters by the far one's: both ends use their
        own card and the long link; the gateways themselves are no limit."""
        mine = np.searchsorted(self.starts, source, side="right") - 1
        yours = np.searchsorted(self.starts, target, side="right") - 1
        parts = []
        for number, site in enumerate(self.sites):
            inside = np.flatnonzero((mine == number) & (yours == number))
            start = self.starts[number]
            path = site.paths(source[inside] - start, target[inside] - start, keys[inside], routing)
            parts.append((inside, np.where(path >= 0, path + self._firsts[number], -1)))
        widest = max([3, *(part.shape[1] for _, part in parts)])
        found = np.full((len(source), widest), -1, np.int64)
        for rows, path in parts:
            found[rows, : path.shape[1]] = path
        across = np.flatnonzero(mine != yours)
        if len(across):
            for number, site in enumerate(self.sites):
                out, into = across[mine[across] == number], across[yours[across] == number]
                found[out, 0] = self._ends(number, site, source[out])[0]
                found[into, 1] = self._ends(number, site, target[into])[1]
            found[across, 2] = self._long + mine[across] * len(self.sites) + yours[across]
        return found

    def _ends(self, number: int, site: FabricGraph, ranks: Ints) -> tuple[Ints, Ints]:
        """The links of these ranks' cards, out and in."""
        cards = np.flatnonzero(site.links.tier == site.links.tiers.index("cards"))
        first, local = self._firsts[number] + cards[0], ranks - self.starts[number]
        return first + local, first + site.ranks + local
