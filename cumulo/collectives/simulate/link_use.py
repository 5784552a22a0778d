"""LinkUse: how busy each link was over time. The player fills it; heat maps and reports read it."""

from dataclasses import dataclass, field

import numpy as np

from cumulo.collectives.simulate.fabrics.links import Floats, Ints, LinkTable

_MOST_SPANS = 512  # after which neighbours are joined, so that long runs stay small


@dataclass
class LinkUse:
    links: LinkTable
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    rates: list[Floats] = field(default_factory=list)  # bytes/s of each link, a row for each span

    def add(self, start_s: float, end_s: float, paths: Ints, rate: Floats) -> None:
        inside = paths >= 0
        spread = np.broadcast_to(np.where(np.isfinite(rate), rate, 0.0)[:, None], paths.shape)
        row = np.bincount(paths[inside], spread[inside], len(self.links.capacity))
        self.starts.append(start_s)
        self.ends.append(end_s)
        self.rates.append(row.astype(np.float64))
        if len(self.starts) > _MOST_SPANS:
            self._halve()

    def _halve(self) -> None:
        starts, ends, rates = [], [], []
        for one in range(0, len(self.starts) - 1, 2):
            first, second = self.ends[one] - self.starts[one], self.ends[one + 1] - self.starts[one + 1]
            start, end = min(self.starts[one : one + 2]), max(self.ends[one : one + 2])
            whole = end - start
            starts.append(start)
            ends.append(end)
            rates.append((self.rates[one] * first + self.rates[one + 1] * second) / (whole or 1.0))
        if len(self.starts) % 2:
            starts.append(self.starts[-1])
            ends.append(self.ends[-1])
            rates.append(self.rates[-1])
        self.starts, self.ends, self.rates = starts, ends, rates

    @property
    def end_s(self) -> float:
        return max(self.ends, default=0.0)

    def bytes_by_link(self) -> Floats:
        total = np.zeros(len(self.links.capacity))
        for start, end, row in zip(self.starts, self.ends, self.rates, strict=True):
            total += row * (end - start)
        return total

    def binned(self, links: Ints, bins: int) -> Floats:
        """Share of its capacity that each of `links` carried, in equal spans of time: (links, bins)."""
        width = (self.end_s or 1.0) / bins
        found = np.zeros((len(links), bins))
        for start, end, row in zip(self.starts, self.ends, self.rates, strict=True):
            for one in range(int(start / width), min(bins, int(np.ceil(end / width)))):
                overlap = min(end, (one + 1) * width) - max(start, one * width)
                found[:, one] += row[links] * max(0.0, overlap) / width
        capacity = self.links.capacity[links]
        return found / np.where(capacity > 0, capacity, 1.0)[:, None]

    def busiest(self, count: int) -> Ints:
        """Links by their mean use, the busiest first, unused ones left out."""
        capacity = np.where(self.links.capacity > 0, self.links.capacity, np.inf)
        mean = self.bytes_by_link() / capacity
        order = np.argsort(-mean, kind="stable")[:count]
        return order[mean[order] > 0]

    def by_tier(self) -> dict[str, tuple[float, float]]:
        """Mean and highest share of capacity over the whole run, of each tier's used links."""
        capacity = np.where(self.links.capacity > 0, self.links.capacity, np.inf)
        mean = self.bytes_by_link() / capacity / (self.end_s or 1.0)
        found = {}
        for number, tier in enumerate(self.links.tiers):
            mine = mean[(self.links.tier == number) & (mean > 0)]
            if len(mine):
                found[tier] = (float(mine.mean()), float(mine.max()))
        return found
