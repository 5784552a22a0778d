"""The report of a simulated cluster as one HTML page: figures, a Gantt chart, a map of the nodes."""

import itertools
from collections.abc import Sequence
from html import escape

from cumulo.base import svg
from cumulo.base.figures import RunFigure, figure_html
from cumulo.base.page import page as html_page
from cumulo.base.quantities import quantity
from cumulo.cluster.simulate.outcome import ClusterRun

_WIDTH, _ROW = 960.0, 12.0
_MOST_NODES, _MOST_BARS = 128, 20_000  # rows of the Gantt chart, and what can be drawn there
KEY = (
    "JCT: job completion time, from arrival to end. use: share of the GPUs' time. fairness: Jain's index "
    "over the tenants' mean slowdown; 1 is even."
)
_BARS = "A bar is a job on a node, as high as its share of the node's GPUs; point at it to see its name."
_STYLE = "svg text{font-size:9px}"
FIGURES = (
    RunFigure("", lambda run: len(run.outcomes), heading="jobs"),
    RunFigure("mean JCT", lambda run: run.mean_jct_s, "s", "lower", "mean JCT"),
    RunFigure("p99 JCT", lambda run: run.percentile_jct_s(99), "s", "lower", "p99 JCT"),
    RunFigure("mean wait", lambda run: run.mean_wait_s, "s", "lower", "mean wait"),
    RunFigure("makespan", lambda run: run.makespan_s, "s", "lower", "makespan"),
    RunFigure("utilization", lambda run: 100 * run.utilisation, "%", heading="use", shown="{:.1f} %"),
    RunFigure("slowest decision", lambda run: 1e3 * run.slowest_decision_s, "ms", "lower"),
    RunFigure(
        "fairness", lambda run: run.fairness, heading="fairness", shown="{:.3f}",
        note="Jain's index over the tenants' mean slowdown",
    ),
)  # fmt: skip


def page(runs: Sequence[tuple[str, ClusterRun]]) -> str:
    parts = [_cluster(runs), figure_html("policy", runs, FIGURES), f"<p>{KEY} {_BARS}</p>"]
    for name, run in runs:
        parts += [f"<h2>{escape(name)}</h2>", _left(run), "<h3>Jobs on nodes over time</h3>", gantt(run),
                  _cut(run), "<h3>Share of each node's GPU time that was used</h3>", node_map(run)]  # fmt: skip
    return html_page("Cluster simulation", *parts, style=_STYLE)


def _cluster(runs: Sequence[tuple[str, ClusterRun]]) -> str:
    """The cluster of all runs: they differ in the policy alone."""
    run = runs[0][1]
    jobs = len(run.outcomes) + len(run.unfinished) + len(run.impossible)
    gpus = sum(node.gpus for node in run.nodes)
    words = f"{jobs:,} job{'' if jobs == 1 else 's'} on {len(run.nodes):,} nodes with {gpus:,} GPUs"
    if left := len(run.impossible):
        words += f"; {left:,} of them {'is' if left == 1 else 'are'} too large for the cluster and left out"
    return f"<p>{words}.</p>"


def _left(run: ClusterRun) -> str:
    left = len(run.unfinished)
    return (
        f"<p>{left:,} job{' never ends' if left == 1 else 's never end'} under this policy.</p>"
        if left
        else ""
    )


def _cut(run: ClusterRun) -> str:
    shown = len(_rows(run))
    if shown == len(run.nodes):
        return ""
    return f"<p>The chart shows the first {shown} of {len(run.nodes):,} nodes.</p>"


def _rows(run: ClusterRun) -> dict[str, int]:
    """The first nodes, as many as a chart can show with all that ran there; at least one."""
    bars = {node.name: 0 for node in run.nodes[:_MOST_NODES]}
    for one in run.segments:
        for node in {place.node for place in one.places} & bars.keys():
            bars[node] += 1
    sums = itertools.accumulate(bars.values())
    return {
        name: row
        for row, (name, drawn) in enumerate(zip(bars, sums, strict=True))
        if not row or drawn <= _MOST_BARS
    }


def colour(job_id: str) -> str:
    """The same for a job wherever it is drawn."""
    hue = sum(ord(letter) * (7 + place) for place, letter in enumerate(job_id)) * 47 % 360
    return f"hsl({hue} 55% 58%)"


def gantt(run: ClusterRun) -> str:
    rows = _rows(run)
    width = {node.name: node.gpus for node in run.nodes}
    begin, span = run.begin_s, max(run.makespan_s, 1.0)
    bars: list[str] = []
    for one in run.segments:
        x = 90 + (one.begin_s - begin) / span * (_WIDTH - 100)
        long = max(0.5, (one.end_s - one.begin_s) / span * (_WIDTH - 100))
        for node in dict.fromkeys(place.node for place in one.places):
            if node not in rows:
                continue
            gpus = {gpu for place in one.places if place.node == node for gpu in place.gpus} or {0}
            tasks = len(one.places)
            tip = f"{one.job_id}: {quantity(one.end_s - one.begin_s, 's')}, {tasks} task{'' if tasks == 1 else 's'}"
            for first, count in _stretches(sorted(gpus)):
                high = _ROW * count / max(1, width[node])
                y = rows[node] * (_ROW + 2) + _ROW * first / max(1, width[node])
                fill = colour(one.job_id)
                bars.append(svg.tag("rect", svg.title(tip), x=x, y=y, width=long, height=high, fill=fill))
    labels = [svg.text(84, number * (_ROW + 2) + 9, name, "end") for name, number in rows.items()]
    high = len(rows) * (_ROW + 2) + 16
    ticks = [(part, "start" if not part else "end" if part == 4 else "middle") for part in range(5)]
    axis = "".join(
        svg.text(
            90 + (_WIDTH - 100) * part / 4, high - 4, quantity(span * part / 4, "s") if part else "0", anchor
        )
        for part, anchor in ticks
    )
    return svg.picture(_WIDTH, high, *labels, *bars, axis, label="Gantt chart of the jobs on the nodes")


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of GPUs next to each other: the first, and how many. What lies between two stretches is another
    job's."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return found


def node_map(run: ClusterRun) -> str:
    """A square per node, row by row of leaf switches, darker the more of its GPU time was used."""
    used: dict[str, float] = {}
    for one in run.segments:
        for place in one.places:
            used[place.node] = used.get(place.node, 0.0) + len(place.gpus) * (one.end_s - one.begin_s)
    leaves: dict[str, list[str]] = {}
    gpus = {node.name: node.gpus for node in run.nodes}
    for node in run.nodes:
        leaves.setdefault(node.leaf or "nodes", []).append(node.name)
    squares, y = [], 0.0
    per_row, whole_s = 64, run.makespan_s
    for leaf, names in list(leaves.items())[:200]:
        squares.append(svg.text(0, y + 9, leaf))
        for number, name in enumerate(names[:1024]):
            share = min(1.0, used.get(name, 0.0) / max(1e-9, gpus[name] * whole_s))
            squares.append(
                svg.tag(
                    "rect", svg.title(f"{name}: {100 * share:.0f} % of its GPU time"), x=70 + number % per_row * 13,
                    y=y + number // per_row * 13, width=11, height=11, fill=f"hsl(205 60% {92 - 60 * share:.0f}%)",
                )
            )  # fmt: skip
        y += 13.0 * (1 + (min(len(names), 1024) - 1) // per_row) + 3
    return svg.picture(_WIDTH, max(y, 14.0), *squares, label="Map of the nodes by leaf switch")
