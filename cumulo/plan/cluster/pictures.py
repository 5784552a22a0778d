"""The pictures of a cluster plan as SVG: fabric, shares of time, checkpoint intervals. The cluster report
calls it."""

import math
from collections.abc import Sequence

from cumulo.base import svg
from cumulo.base.chart import COLORS, Chart, Series, chart_file
from cumulo.base.quantities import percent, quantity
from cumulo.plan.cluster.checkpoints import SweepPoint
from cumulo.plan.cluster.fabric import TierCount
from cumulo.spec.cluster import Cluster

_WIDTH = 860


def fabric_picture(cluster: Cluster, tiers: Sequence[TierCount]) -> str:
    """Tiers from the top down to the nodes; the bar under a tier is as wide as its bandwidth to the tier below."""
    levels = [tier for tier in reversed(tiers) if tier.switches or tier.cables_down]
    widest = max(tier.bytes_per_s_down for tier in levels)
    parts: list[str] = []
    y = 10
    for tier in levels:
        name = f"{tier.switches:,} × {tier.tier.name} switch" if tier.switches else tier.tier.name
        parts.append(_box(y, "#dbe7f3", name, f"joins {tier.tier.nodes:,} nodes"))
        wide = 40 + 560 * tier.bytes_per_s_down / widest
        middle = _WIDTH / 2
        parts.append(
            svg.tag(
                "rect", x=middle - wide / 2, y=y + 40, width=wide, height=34, fill="#e0802f", opacity="0.35"
            )
            + _text(
                middle,
                y + 62,
                f"{tier.cables_down:,} cables · {tier.bytes_per_s_down / 1e12:,.1f} TB/s each way",
            )
        )
        y += 74
    node = cluster.node
    inside = f"{node.scale_up_gpus} GPUs joined at {node.device.link_bytes_per_s / 1e9:,.0f} GB/s each"
    parts.append(_box(y, "#dff0e3", f"{cluster.nodes:,} × {node.name}", inside))
    return _svg(y + 50, parts, "The fabric, from its top tier down to the nodes")


def share_picture(title: str, shares: Sequence[tuple[str, float]]) -> str:
    """One bar, in parts that add up to all of it."""
    whole = sum(share for _, share in shares) or 1.0
    parts, x = [], 10.0
    for index, (name, share) in enumerate(shares):
        wide = (_WIDTH - 20) * share / whole
        colour = COLORS[index % len(COLORS)]
        label = f"{name}: {percent(share / whole)}"
        parts.append(svg.tag("rect", svg.title(label), x=x, y=8, width=wide, height=34, fill=colour))
        column, row = index % 4, index // 4
        parts.append(
            svg.tag("rect", x=10 + 212 * column, y=54 + 20 * row, width=12, height=12, fill=colour)
            + _text(27 + 212 * column, 64 + 20 * row, label, "start")
        )
        x += wide
    return _svg(64 + 20 * math.ceil(len(shares) / 4), parts, title)


def interval_picture(sweeps: Sequence[tuple[str, Sequence[SweepPoint]]]) -> str:
    """Share of time that trains over the interval between checkpoints, for each way to keep them: a line by
    formula, dots simulated, with the range of 90 of 100 runs."""
    series = []
    for color, (name, sweep) in enumerate(sweeps):
        at = [point.interval_s / 60 for point in sweep]
        formula = [(x, 100 * point.by_formula) for x, point in zip(at, sweep, strict=True)]
        simulated = [(x, 100 * point.simulated.ettr) for x, point in zip(at, sweep, strict=True)]
        ranges = [
            (x, 100 * point.simulated.ettr_low, 100 * point.simulated.ettr_high)
            for x, point in zip(at, sweep, strict=True)
        ]
        series.append(Series(f"{name}, by formula", formula, color=color))
        tips = [_told(name, point) for point in sweep]
        series.append(Series(f"{name}, simulated", simulated, "dots", color, tips, ranges))
    title = "Share of time that trains: lines by formula, dots simulated"
    x_label = "training time between two checkpoints, minutes"
    return chart_file(Chart(title, x_label, "share of time, %", series, x_log=True, y_from_zero=False))


def _told(name: str, point: SweepPoint) -> str:
    shares = f"{percent(point.by_formula)} by formula, {percent(point.simulated.ettr)} simulated"
    return f"{name}, every {quantity(point.interval_s, 's')}: {shares}"


def _box(y: float, colour: str, name: str, detail: str) -> str:
    return (
        svg.tag("rect", x=130, y=y, width=_WIDTH - 260, height=40, rx=6, fill=colour, stroke="#99a")
        + _text(_WIDTH / 2, y + 17, name)
        + _text(_WIDTH / 2, y + 33, detail)
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return svg.text(round(x), round(y), text, anchor)


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return svg.picture(_WIDTH, round(height), svg.title(title), *parts, label=title, xmlns=svg.XMLNS)
