"""The HTML page of a compiled model: figures, graphs before and after as pictures, reasons, kernels as text.
`cumulo compile model --report` writes it."""

from collections.abc import Sequence
from html import escape

from cumulo.base.page import html_table, page
from cumulo.base.quantities import quantity
from cumulo.base.svg import line, picture, tag, text, title
from cumulo.compile.passes.report import CompileReport, DrawnNode, GraphReport

MOST_DRAWN = 60  # nodes of a picture: a model's layers look alike
_ROW, _WIDTH, _COLUMNS = 34, 560, 4
_STYLE = """
pre{font-size:12.5px;overflow-x:auto;margin:8px 0}rect{fill:var(--card);stroke:var(--edge)}
rect.kernel{stroke:var(--s2);stroke-width:2}line.edge{stroke:var(--soft);stroke-opacity:.45}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:14px}
"""


def report_page(report: CompileReport) -> str:
    speed, parts = report.speed, []
    tiles = {
        "eager, a call": quantity(speed.eager_s, "s"),
        "predicted, eager": quantity(report.predicted_s(before=True), "s"),
        "compiled, a call": quantity(speed.compiled_s, "s"),
        "predicted, compiled": quantity(report.predicted_s(), "s"),
        "first call, with compiling": quantity(speed.first_s, "s"),
        "largest difference from eager": f"{report.difference:.1e}",
    }
    parts.append(
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{name}</span></div>'
            for name, value in tiles.items()
        )
        + "</div>"
    )
    for graph in report.graphs:
        parts += _graph(graph)
    if report.breaks:
        parts.append("<h2>Where the graph breaks</h2>")
        parts.append(
            html_table(("line", "why", "code"), [(one.line, one.why, one.code) for one in report.breaks])
        )
    if report.recompiles:
        parts.append("<h2>What was compiled again</h2>")
        parts.append(html_table(("the guard that failed",), [(why,) for why in report.recompiles]))
    return page(f"{report.model}, compiled", *parts, style=_STYLE)


def _graph(graph: GraphReport) -> list[str]:
    fused = [
        (name, f"{times:,}", f"{operations:,}", quantity(saved, "B"))
        for name, times, operations, saved in graph.patterns()
    ]
    kernels = "".join(
        f"<details><summary>{escape(one.name)}: {one.operations} operations, run {one.times} times by {one.code}"
        f"</summary><pre>{escape(one.text)}</pre></details>"
        for one in graph.kernels
    )
    return [
        f"<h2>{escape(graph.summary)}</h2>",
        f"<p>Peak memory {quantity(graph.peak_before_bytes, 'B')} before and "
        f"{quantity(graph.peak_after_bytes, 'B')} after; {quantity(graph.reused_bytes, 'B')} are reused, "
        f"{graph.in_place} results are written in place.</p>",
        '<div class="pair">',
        f'<div class="card"><h3>Before</h3>{draw(graph.graph_before)}</div>',
        f'<div class="card"><h3>After</h3>{draw(graph.graph_after)}</div></div>',
        "<h3>Fused</h3>",
        html_table(("pattern", "times", "operations", "less traffic"), fused),
        "<h3>These could not fuse</h3>",
        html_table(
            ("because", "operations", "first line"),
            [(why, f"{count:,}", where) for why, count, where in graph.reasons()],
        ),
        kernels,
        f"<details><summary>The function that runs it</summary><pre>{escape(graph.function)}</pre></details>",
    ]


def draw(nodes: Sequence[DrawnNode]) -> str:
    """The first operations of a graph, each below what it reads; views are lines only."""
    through: dict[str, list[str]] = {}
    shown: list[DrawnNode] = []
    for node in nodes:
        reads = [source for name in node.reads for source in through.get(name, [name])]
        through[node.name] = reads if node.is_view else [node.name]
        if not node.is_view:
            shown.append(node)
    drawn, places, used = shown[:MOST_DRAWN], {}, [0] * (MOST_DRAWN + 1)
    level: dict[str, int] = {}
    for node in drawn:
        reads = [source for name in node.reads for source in through.get(name, [name])]
        depth = 1 + max((level[one] for one in reads if one in level), default=-1)
        while used[depth] == _COLUMNS and depth < MOST_DRAWN:
            depth += 1
        level[node.name], used[depth] = depth, used[depth] + 1
        places[node.name] = (depth, used[depth] - 1)
    wide, parts = _WIDTH / _COLUMNS, []

    def corner(name: str) -> tuple[float, float]:
        depth, column = places[name]
        return column * wide + 4, depth * _ROW + 4

    for node in drawn:
        x, y = corner(node.name)
        for name in {source for one in node.reads for source in through.get(one, [one])} & places.keys():
            left, top = corner(name)
            parts.append(line(left + wide / 2 - 4, top + 22, x + wide / 2 - 4, y, "edge"))
    for node in drawn:
        x, y = corner(node.name)
        label = node.label if len(node.label) <= 20 else node.label[:19] + "…"
        kind = "kernel" if node.is_kernel else None
        tip = title(f"{node.name}: {node.label}, {quantity(node.nbytes, 'B')}")
        box = tag("rect", tip, x=x, y=y, width=wide - 8, height=22, rx=5, class_=kind)
        parts += [box, text(x + wide / 2 - 4, y + 15, label, "middle")]
    height = (max((depth for depth, _ in places.values()), default=0) + 1) * _ROW + 8
    rest = (
        f"<p class='soft'>The first {len(drawn)} of {len(shown):,} operations.</p>"
        if len(shown) > len(drawn)
        else ""
    )
    return picture(_WIDTH, height, *parts, label="operations and what they read") + rest
