"""A chart as an SVG file of its own, with title, legend and colours. For verbs that draw to a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from cumulo.base.text_file import write_text_file

if TYPE_CHECKING:
    from cumulo.load.svg import Chart

_COLORS = ("#2563eb", "#1e3a8a", "#f59e0b", "#92400e", "#059669", "#7c3aed", "#db2777", "#475569")
_STYLE = (
    "<style>svg{background:#fff;font:12px sans-serif}.grid{stroke:#eee}.axis,.tick{stroke:#888}.line{fill:none;"
    "stroke-width:2}.bound{stroke:#dc2626;stroke-dasharray:4 4}.note{fill:#dc2626}"
    + "".join(f".line.s{at}{{stroke:{color}}}.dot.s{at}{{fill:{color}}}" for at, color in enumerate(_COLORS))
    + "</style>"
)
_ENTRY, _PER_LINE = 130, 4  # width of a short name in the legend, and how many stand in a line


def write_chart(path: Path, chart: "Chart") -> None:
    write_text_file(path, chart_text(chart))


def chart_text(chart: "Chart") -> str:
    """Long names get a line of the legend each."""
    from cumulo.base import svg
    from cumulo.load.svg import HEIGHT, LEFT, WIDTH, draw

    text = draw(chart)
    per_line = _PER_LINE if all(len(one.name) < 18 for one in chart.series) else 1
    legend = [
        svg.text(
            LEFT + _ENTRY * (at % per_line),
            HEIGHT + 14 + 16 * (at // per_line),
            one.name,
            fill=_COLORS[one.color],
        )
        for at, one in enumerate(chart.series)
    ]
    heading = svg.text(LEFT, -6, chart.title, font_weight="bold")
    inner = text.partition(">")[2].removesuffix("</svg>")
    box = f"0 -22 {WIDTH} {HEIGHT + 30 + 16 * -(-len(legend) // per_line)}"
    return svg.tag("svg", _STYLE, heading, *legend, inner, xmlns=svg.XMLNS, width=2 * WIDTH, viewBox=box)
