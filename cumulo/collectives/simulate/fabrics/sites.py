"""Two or more fabrics joined by long links: datacentres, each a whole fabric, and between each pair one bundle with
its own bandwidth and delay."""

from collections.abc import Sequence

import numpy as np

from cumulo.collectives.simulate.fabrics.links import FabricGraph, Ints, LinkTable, Routing


class JoinedSites:
    """Ranks are numbered site after site."""

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

    def fail(self, link: int, capacity: float = 0.0) -> None:
        self.links.capacity[link] = capacity
