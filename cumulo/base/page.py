"""Reports as HTML pages that need nothing but themselves: tables, inline SVG, light and dark. Verbs with an option
for such a report write it with this."""

from collections.abc import Iterable, Sequence
from html import escape

from rich.text import Text

from cumulo.base.chart import Chart, draw

_STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--text:#1d1d1f;--soft:#6b6b70;--edge:#e4e4e2;
--s0:#2463c4;--s1:#d2620f;--s2:#16835a;--s3:#8b44ac;--bad:#b3261e;--good:#16735a}
@media (prefers-color-scheme:dark){:root{--page:#141416;--card:#1d1d20;--text:#ececee;--soft:#a0a0a8;
--edge:#35353a;--s0:#74a7f7;--s1:#f59a55;--s2:#4cc998;--s3:#cb92e8;--bad:#ff8a80;--good:#5fd3ae}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}h1{font-size:24px;margin:0 0 4px}
h2{font-size:18px;margin:36px 0 12px}h3{font-size:14px;margin:0 0 6px;font-weight:600}
p{margin:4px 0}.soft{color:var(--soft)}.red{color:var(--bad)}.green{color:var(--good)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:12px;margin:20px 0}
.tile,.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{font-size:13px;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:14px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 7px;font-size:13.5px;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}
th{font-weight:500;color:var(--soft);font-size:12.5px;white-space:normal;vertical-align:bottom}th:first-child,td:first-child{text-align:left}
details{margin:14px 0}summary{cursor:pointer;font-weight:600}
svg{width:100%;height:auto;display:block}svg text{font-size:11.5px;fill:var(--soft)}
.grid{stroke:var(--edge);stroke-width:1}.axis,.tick{stroke:var(--soft);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.bound{stroke:var(--bad);stroke-dasharray:5 4}
svg .note{fill:var(--bad)}.dot{fill-opacity:.75}
.line.s0{stroke:var(--s0)}.line.s1{stroke:var(--s1)}.line.s2{stroke:var(--s2)}.line.s3{stroke:var(--s3)}
.dot.s0{fill:var(--s0)}.dot.s1{fill:var(--s1)}.dot.s2{fill:var(--s2)}.dot.s3{fill:var(--s3)}
.key{font-size:12.5px;color:var(--soft);margin:0 0 2px}.key i{display:inline-block;width:12px;height:3px;
margin:0 5px 3px 0;border-radius:2px}.key span{margin-right:14px}
"""


def page(title: str, *parts: str, style: str = "") -> str:
    """The whole page. `style`: CSS of its own."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{''.join(parts)}</main></body></html>\n"
    )


def html_table(headings: Sequence[str], lines: Iterable[Sequence[str | Text]]) -> str:
    """A card with a line for each row; a cell with a style is in the class of that name."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    rows = ("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    top = f"<tr>{head}</tr>" if any(headings) else ""
    return f'<div class="card scroll"><table>{top}{"".join(rows)}</table></div>'


def _cell(cell: str | Text) -> str:
    if isinstance(cell, Text) and cell.style:
        return f'<span class="{cell.style}">{escape(cell.plain)}</span>'
    return escape(str(cell))


def card(chart: Chart) -> str:
    """A chart below its title and, where it has several series, their names."""
    key = ""
    if len(chart.series) > 1:
        names = (
            f'<span><i style="background:var(--s{s.color})"></i>{escape(s.name)}</span>' for s in chart.series
        )
        key = f'<p class="key">{"".join(names)}</p>'
    return f'<div class="card"><h3>{escape(chart.title)}</h3>{key}{draw(chart)}</div>'
