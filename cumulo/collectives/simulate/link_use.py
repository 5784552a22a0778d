"""LinkUse: how busy each link was over time. The player fills it; heat maps and reports read it."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cumulo.base import svg
from cumulo.base.quantities import quantity
from cumulo.collectives.simulate.fabrics.links import Floats, Ints, LinkTable

_MOST_SPANS = 512  # after which neighbours are joined, so that long runs stay small


@dataclass
class LinkUse:
    links: LinkTable
    # Start, end, and bytes/s of each link between them.
    spans: list[tuple[float, float, Floats]] = field(default_factory=list)

    def add(self, start_s: float, end_s: float, paths: Ints, rate: Floats) -> None:
        inside = paths >= 0
        spread = np.broadcast_to(np.where(np.isfinite(rate), rate, 0.0)[:, None], paths.shape)
        row = np.bincount(paths[inside], spread[inside], len(self.links.capacity))
        self.spans.append((start_s, end_s, row.astype(np.float64)))
        if len(self.spans) > _MOST_SPANS:
            pairs = zip(self.spans[::2], self.spans[1::2], strict=False)
            alone = self.spans[len(self.spans) // 2 * 2 :]
            self.spans = [*(_joined(one, other) for one, other in pairs), *alone]

    @property
    def end_s(self) -> float:
        return max((end for _, end, _ in self.spans), default=0.0)

    def bytes_by_link(self) -> Floats:
        total = np.zeros(len(self.links.capacity))
        for start, end, row in self.spans:
            total += row * (end - start)
        return total

    def binned(self, links: Ints, bins: int) -> Floats:
        """Share of its capacity that each of `links` carried, in equal spans of time: (links, bins)."""
        width = (self.end_s or 1.0) / bins
        found = np.zeros((len(links), bins))
        for start, end, row in self.spans:
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


def _joined(
    one: tuple[float, float, Floats], other: tuple[float, float, Floats]
) -> tuple[float, float, Floats]:
    """Two spans as one that carries the same bytes."""
    start, end = min(one[0], other[0]), max(one[1], other[1])
    carried = one[2] * (one[1] - one[0]) + other[2] * (other[1] - other[0])
    return start, end, carried / (end - start or 1.0)


_ROWS, _BINS = 64, 120
_LEFT, _TOP, _CELL, _ROW = 280, 56, 6.0, 12.0
_STEPS = ("#f1f5f9", "#dbeafe", "#93c5fd", "#3b82f6", "#1d4ed8", "#f59e0b", "#dc2626")
_BOUNDS = (0.02, 0.2, 0.4, 0.6, 0.8, 0.98)


def heat_map(use: LinkUse, title: str) -> str:
    """The busiest links of each tier, a row each; red is full."""
    links = _chosen(use)
    shares = use.binned(links, _BINS)
    parts = [svg.text(10, 20, title, font_weight="bold", font_size=14)]
    names = ("idle", "2 to 20%", "20 to 40%", "40 to 60%", "60 to 80%", "80 to 98%", "full")
    for at, (colour, name) in enumerate(zip(_STEPS, names, strict=True)):
        x = float(_LEFT + 100 * at)
        parts.append(svg.tag("rect", x=x, y=32, width=12, height=12, fill=colour, stroke="#cbd5e1"))
        parts.append(svg.text(x + 16, 42, name))
    y = float(_TOP)
    tier = -1
    for row, link in zip(shares, links, strict=True):
        if use.links.tier[link] != tier:
            tier = int(use.links.tier[link])
            parts.append(svg.text(10, y + 14, use.links.tiers[tier], font_weight="bold"))
            y += 20
        parts.append(svg.text(_LEFT - 6, y + 9, use.links.name(int(link)), "end", font_size=9))
        parts.extend(_cells(row, y))
        y += _ROW
    for step in range(5):
        middle = _LEFT + _CELL * _BINS * step / 4
        parts.append(svg.text(middle, y + 18, quantity(use.end_s * step / 4, "s"), "middle"))
    background = svg.tag("rect", width=_LEFT + _CELL * _BINS + 40, height=y + 30, fill="#ffffff")
    return svg.picture(
        _LEFT + _CELL * _BINS + 40,
        y + 30,
        background,
        *parts,
        label=title,
        xmlns=svg.XMLNS,
        font_family="sans-serif",
        font_size=11,
    )


def _cells(row: "np.ndarray[tuple[int], np.dtype[np.float64]]", y: float) -> list[str]:
    """Neighbours of one colour are one rectangle."""
    levels = np.searchsorted(_BOUNDS, row, side="right")
    edges = np.flatnonzero(np.r_[True, levels[1:] != levels[:-1], True])
    return [
        svg.tag(
            "rect",
            svg.title(f"{float(row[low:high].mean()):.0%}"),
            x=_LEFT + _CELL * float(low),
            y=y,
            width=_CELL * float(high - low),
            height=_ROW - 1,
            fill=_STEPS[int(levels[low])],
        )
        for low, high in pairwise(edges.tolist())
    ]


def _chosen(use: LinkUse) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Chooses as many rows for each tier in use: its busiest, and where there are more, also quieter ones to
    compare with."""
    total = use.bytes_by_link() / np.where(use.links.capacity > 0, use.links.capacity, np.inf)
    tiers = [tier for tier in range(len(use.links.tiers)) if (total[use.links.tier == tier] > 0).any()]
    each = max(4, _ROWS // max(1, len(tiers)))
    found = []
    for tier in tiers:
        used = np.flatnonzero((use.links.tier == tier) & (total > 0))
        order = used[np.argsort(-total[used], kind="stable")]
        if len(order) > each:
            half = each // 2
            spread = np.linspace(half, len(order) - 1, each - half).astype(int)
            order = np.concatenate([order[:half], order[spread]])
        found.append(order)
    return np.concatenate(found) if found else np.zeros(0, np.int64)
