"""The pictures of a cluster plan as SVG: fabric, shares of time, checkpoint intervals. The cluster report
calls it."""

import math
from collections.abc import Callable, Sequence

from cumulo.base import svg
from cumulo.base.quantities import percent, quantity
from cumulo.plan.cluster.checkpoints import SweepPoint
from cumulo.plan.cluster.fabric import TierCount
from cumulo.spec.cluster import Cluster

COLOURS = ("#2f6fb2", "#e0802f", "#3f9a5a", "#c2453d", "#7d62ad", "#8a6d3b", "#4fb0b5", "#b0568f", "#8c8c8c")
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
            f'<rect x="{middle - wide / 2:.0f}" y="{y + 40}" width="{wide:.0f}" height="34" fill="#e0802f" '
            f'opacity="0.35"/>'
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
        colour = COLOURS[index % len(COLOURS)]
        label = f"{name}: {percent(share / whole)}"
        parts.append(svg.tag("rect", svg.title(label), x=x, y=8, width=wide, height=34, fill=colour))
        column, row = index % 4, index // 4
        parts.append(
            f'<rect x="{10 + 212 * column}" y="{54 + 20 * row}" width="12" height="12" fill="{colour}"/>'
            + _text(27 + 212 * column, 64 + 20 * row, label, "start")
        )
        x += wide
    return _svg(64 + 20 * math.ceil(len(shares) / 4), parts, title)


def interval_picture(sweeps: Sequence[tuple[str, Sequence[SweepPoint]]]) -> str:
    """Share of time that trains over the interval between checkpoints, for each way to keep them: a line by
    formula, dots simulated, with the range of 90 of 100 runs."""
    left, right, top, bottom = 70, _WIDTH - 30, 16, 250
    points = [point for _, sweep in sweeps for point in sweep]
    low = min(min(p.by_formula, p.simulated.ettr_low) for p in points)
    high = max(max(p.by_formula, p.simulated.ettr_high) for p in points)
    first, last = (math.log(choose(p.interval_s for p in points)) for choose in (min, max))

    def x(interval_s: float) -> float:
        return left + (right - left) * (math.log(interval_s) - first) / (last - first or 1.0)

    def y(share: float) -> float:
        return bottom - (bottom - top) * (share - low) / (high - low or 1.0)

    parts = [f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>']
    for step in range(5):
        share = low + (high - low) * step / 4
        parts.append(_text(left - 6, y(share) + 4, percent(share), "end"))
        interval_s = math.exp(first + (last - first) * step / 4)
        parts.append(_text(x(interval_s), bottom + 18, quantity(interval_s, "s")))
    parts.append(_text((left + right) / 2, bottom + 38, "training time between two checkpoints"))
    for index, (name, sweep) in enumerate(sweeps):
        colour = COLOURS[index]
        line = " ".join(f"{x(p.interval_s):.1f},{y(p.by_formula):.1f}" for p in sweep)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [_dot(x(p.interval_s), y, p, name, colour) for p in sweep]
        parts.append(
            f'<rect x="{left + 260 * index}" y="{bottom + 52}" width="12" height="12" fill="{colour}"/>'
            + _text(left + 17 + 260 * index, bottom + 62, name, "start")
        )
    return _svg(bottom + 72, parts, "Share of time that trains: lines by formula, dots simulated")


def _dot(at: float, y: Callable[[float], float], point: SweepPoint, name: str, colour: str) -> str:
    run = point.simulated
    shares = f"{percent(point.by_formula)} by formula, {percent(run.ettr)} simulated"
    label = f"{name}, every {quantity(point.interval_s, 's')}: {shares}"
    interval = f"M{at:.1f} {y(run.ettr_low):.1f}V{y(run.ettr_high):.1f}"
    return svg.tag("path", d=interval, stroke=colour) + svg.dot(at, y(run.ettr), 4, label, fill=colour)


def _box(y: float, colour: str, name: str, detail: str) -> str:
    return (
        f'<rect x="130" y="{y}" width="{_WIDTH - 260}" height="40" rx="6" fill="{colour}" stroke="#99a"/>'
        + _text(_WIDTH / 2, y + 17, name)
        + _text(_WIDTH / 2, y + 33, detail)
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return svg.text(round(x), round(y), text, anchor)


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return svg.picture(_WIDTH, round(height), svg.title(title), *parts, label=title, xmlns=svg.XMLNS)
