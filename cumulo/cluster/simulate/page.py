"""The report of a simulated cluster as one HTML page: figures, a Gantt chart, a map of the nodes."""

from collections.abc import Sequence
from html import escape

from cumulo.base import svg
from cumulo.base.quantities import quantity
from cumulo.cluster.simulate.outcome import ClusterRun

_WIDTH, _ROW = 960.0, 12.0
_MOST_NODES = 128  # rows of the Gantt chart
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1c2733}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #dde}
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}text{font:9px system-ui;fill:#556}
@media(prefers-color-scheme:dark){body{background:#141a20;color:#dde}text{fill:#9ab}}"""


def page(runs: Sequence[tuple[str, ClusterRun]]) -> str:
    parts = [_table(runs)]
    for name, run in runs:
        parts += [f"<h2>{escape(name)}</h2>", "<h3>Who had which node when</h3>", gantt(run),
                  "<h3>GPU time of each node</h3>", node_map(run)]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Cluster simulation</title>'
        f"<style>{_STYLE}</style>"
        f"<h1>Cluster simulation</h1>{''.join(parts)}</html>\n"
    )


def _table(runs: Sequence[tuple[str, ClusterRun]]) -> str:
    heads = ("policy", "jobs", "mean JCT", "p99 JCT", "mean wait", "makespan", "utilization", "fairness")
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for name, run in runs:
        cells = (
            escape(name), f"{len(run.outcomes):,}", quantity(run.mean_jct_s, "s"),
            quantity(run.percentile_jct_s(99), "s"),
            quantity(run.mean_wait_s, "s"), quantity(run.makespan_s, "s"), f"{100 * run.utilisation:.1f} %",
            f"{run.fairness:.3f}",
        )  # fmt: skip
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def colour(job_id: str) -> str:
    """The same for a job wherever it is drawn."""
    hue = sum(ord(letter) * (7 + place) for place, letter in enumerate(job_id)) * 47 % 360
    return f"hsl({hue} 55% 58%)"


def gantt(run: ClusterRun) -> str:
    rows = {node.name: number for number, node in enumerate(run.nodes[:_MOST_NODES])}
    width = {node.name: node.gpus for node in run.nodes}
    begin, span = run.begin_s, max(run.makespan_s, 1.0)
    bars: list[str] = []
    for one in run.segments:
        x = 90 + (one.begin_s - begin) / span * (_WIDTH - 100)
        long = max(0.5, (one.end_s - one.begin_s) / span * (_WIDTH - 100))
        for node in dict.fromkeys(place.node for place in one.places):
            if node not in rows:
                continue
            gpus = sorted(gpu for place in one.places if place.node == node for gpu in place.gpus) or [0]
            high = _ROW * (gpus[-1] - gpus[0] + 1) / max(1, width[node])
            y = rows[node] * (_ROW + 2) + _ROW * gpus[0] / max(1, width[node])
            tip = f"{one.job_id}: {quantity(one.end_s - one.begin_s, 's')} on {len(one.places)} tasks"
            bars.append(
                svg.tag("rect", svg.title(tip), x=x, y=y, width=long, height=high, fill=colour(one.job_id))
            )
    labels = [svg.text(84, number * (_ROW + 2) + 9, name, "end") for name, number in rows.items()]
    high = len(rows) * (_ROW + 2) + 16
    axis = svg.text(90, high - 4, "0") + svg.text(_WIDTH - 10, high - 4, quantity(span, "s"), "end")
    return svg.picture(_WIDTH, high, *labels, *bars, axis, label="Gantt chart of the jobs on the nodes")


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
    per_row = 64
    for leaf, names in list(leaves.items())[:200]:
        squares.append(svg.text(0, y + 9, leaf))
        for number, name in enumerate(names[:1024]):
            share = min(1.0, used.get(name, 0.0) / max(1e-9, gpus[name] * run.makespan_s))
            squares.append(
                svg.tag(
                    "rect", svg.title(f"{name}: {100 * share:.0f} % of its GPU time"), x=70 + number % per_row * 13,
                    y=y + number // per_row * 13, width=11, height=11, fill=f"hsl(205 60% {92 - 60 * share:.0f}%)",
                )
            )  # fmt: skip
        y += 13.0 * (1 + (min(len(names), 1024) - 1) // per_row) + 3
    return svg.picture(_WIDTH, max(y, 14.0), *squares, label="Map of the nodes by leaf switch")
