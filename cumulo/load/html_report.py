"""The report as one HTML page that needs nothing but itself: tables, inline SVG, light and dark.

Called by the command line with a campaign's results. Plots are thinned, so that a page stays small.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cumulo.base.chart import Chart, Series, draw
from cumulo.base.quantiles import quantile
from cumulo.base.quantities import show_duration
from cumulo.load.campaign import LevelResult
from cumulo.load.schedule import Arrivals
from cumulo.load.summary import Spread, timeline
from cumulo.spec.slo import Slo

MOST_POINTS = 400

_STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--text:#1d1d1f;--soft:#6b6b70;--edge:#e4e4e2;
--s0:#2463c4;--s1:#d2620f;--s2:#16835a;--s3:#8b44ac;--bad:#b3261e;--good:#16735a}
@media (prefers-color-scheme:dark){:root{--page:#141416;--card:#1d1d20;--text:#ececee;--soft:#a0a0a8;
--edge:#35353a;--s0:#74a7f7;--s1:#f59a55;--s2:#4cc998;--s3:#cb92e8;--bad:#ff8a80;--good:#5fd3ae}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}h1{font-size:24px;margin:0 0 4px}
h2{font-size:18px;margin:36px 0 12px}h3{font-size:14px;margin:0 0 6px;font-weight:600}
p{margin:4px 0}.soft{color:var(--soft)}.bad{color:var(--bad)}.good{color:var(--good)}
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


def page(
    title: str, facts: Mapping[str, str], results: Sequence[LevelResult], slo: Slo | None, found: float | None
) -> str:
    """The whole page. `facts` are shown in the head; `found` is what the search has found."""
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f'<p class="soft">{escape(name)}: {escape(value)}</p>' for name, value in facts.items()]
    if slo is not None:
        parts.append(f"<p>Objective: {escape(str(slo))}</p>")
    if found is not None:
        parts.append(f'<p class="good">Highest rate that holds it: <b>{found:.3g} requests/s</b></p>')
    if len(results) == 1:
        parts.append(_tiles(results[0]))
    parts += ["<h2>Levels</h2>", _table(results)]
    if len(results) > 1:
        parts += ["<h2>Against the load</h2>", _cards(_sweep_charts(results, slo, found))]
        for result in results:
            heading = f"{result.label}{' (ended early)' if result.stopped else ''}"
            body = _cards(_level_charts(result, slo)) + _errors(result)
            parts.append(f"<details><summary>{escape(heading)}</summary>{body}</details>")
    elif results:
        parts += ["<h2>In detail</h2>", _cards(_level_charts(results[0], slo)), _errors(results[0])]
    parts.append(_footnote(results))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _tiles(result: LevelResult) -> str:
    summary = result.summary
    tiles = [
        (f"{summary.output_tok_s:,.4g}", "output tokens/s"),
        (f"{summary.completed_req_s:,.3g}", "requests/s completed"),
    ]
    for name, spread in (("time to first token", summary.ttft_s), ("between tokens", summary.itl_s)):
        if spread is not None:
            tiles += [
                (show_duration(spread.p50), f"{name}, p50"),
                (show_duration(spread.p99), f"{name}, p99"),
            ]
    if summary.goodput_req_s is not None and summary.slo_share is not None:
        tiles.append((f"{summary.goodput_req_s:,.3g}", f"good requests/s ({summary.slo_share:.1%})"))
    tiles.append((f"{summary.requests - summary.succeeded}", f"of {summary.requests} requests failed"))
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{escape(name)}</span></div>' for value, name in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _table(results: Sequence[LevelResult]) -> str:
    with_slo = any(result.summary.slo_share is not None for result in results)
    head = ["load", "requests", "failed", "requests/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99"]
    head += ["TPOT p50", "end to end p50", "p99"] + (["kept objective", "goodput/s", ""] if with_slo else [])
    rows = []
    for result in results:
        summary = result.summary
        failed = summary.requests - summary.succeeded
        cells = [
            escape(result.label),
            str(summary.requests),
            f'<span class="bad">{failed}</span>' if failed else "0",
            f"{summary.completed_req_s:.3g}",
            f"{summary.output_tok_s:,.4g}",
            *_percentiles(summary.ttft_s, "p50", "p99"),
            *_percentiles(summary.itl_s, "p50", "p99"),
            *_percentiles(summary.tpot_s, "p50"),
            *_percentiles(summary.e2e_s, "p50", "p99"),
        ]
        if with_slo:
            cells.append("-" if summary.slo_share is None else f"{summary.slo_share:.1%}")
            cells.append("-" if summary.goodput_req_s is None else f"{summary.goodput_req_s:.3g}")
            style = {"holds": "good", "fails": "bad"}.get(result.verdict or "", "soft")
            cells.append(f'<span class="{style}">{result.verdict or ""}</span>')
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="card scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'


def _percentiles(spread: Spread | None, *names: str) -> list[str]:
    return [show_duration(None if spread is None else getattr(spread, name)) for name in names]


def _cards(charts: Sequence[Chart]) -> str:
    return f'<div class="cards">{"".join(_card(chart) for chart in charts)}</div>'


def _card(chart: Chart) -> str:
    key = ""
    if len(chart.series) > 1:
        names = (
            f'<span><i style="background:var(--s{s.color})"></i>{escape(s.name)}</span>' for s in chart.series
        )
        key = f'<p class="key">{"".join(names)}</p>'
    return f'<div class="card"><h3>{escape(chart.title)}</h3>{key}{draw(chart)}</div>'


def _sweep_charts(results: Sequence[LevelResult], slo: Slo | None, found: float | None) -> list[Chart]:
    """Figures over the load. A rate that was tried more than once appears once for each trial."""
    ordered = sorted((result for result in results if not result.stopped), key=_load_value)
    ordered = ordered or sorted(results, key=_load_value)
    is_closed = isinstance(ordered[0].load, int)
    x_label = "requests at once" if is_closed else "requests per second offered"
    log = _load_value(ordered[-1]) / max(_load_value(ordered[0]), 1e-9) > 20
    marks = () if found is None else ((f"holds at {found:.3g}/s", found),)

    def over_load(name: str, color: int, value: Any) -> Series:
        return Series(
            name, [(_load_value(r), value(r)) for r in ordered if value(r) is not None], "both", color
        )

    def percentiles(figure: str) -> list[Series]:
        return [
            over_load(name, color, lambda r, n=name: _milliseconds(getattr(r.summary, figure), n))
            for color, name in enumerate(("p50", "p99"))
        ]

    charts = [
        Chart("Output tokens per second", x_label, "tokens/s",
              [over_load("tokens/s", 0, lambda r: r.summary.output_tok_s)], log, marks=marks),
        Chart("Time to first token", x_label, "ms", percentiles("ttft_s"), log, True,
              _bound(slo.ttft_s if slo else None), marks),
        Chart("Time between tokens", x_label, "ms", percentiles("itl_s"), log, True,
              _bound(slo.itl_s if slo else None), marks),
        Chart("End to end", x_label, "ms", percentiles("e2e_s"), log, True,
              _bound(slo.e2e_s if slo else None), marks),
    ]  # fmt: skip
    if slo is not None:
        series = [
            over_load("completed", 0, lambda r: r.summary.completed_req_s),
            over_load("kept the objective", 2, lambda r: r.summary.goodput_req_s),
        ]
        charts.append(Chart("Goodput", x_label, "requests/s", series, log, marks=marks))
    return charts


def _level_charts(result: LevelResult, slo: Slo | None) -> list[Chart]:
    good = [record for record in result.records if record.measured and record.error is None]
    ttft_ms = [(r.due_s, r.ttft_s * 1e3) for r in good if r.ttft_s is not None]
    itls_ms = [itl_s * 1e3 for record in good for itl_s in record.itls_s]
    over_time = timeline(result.records)
    moments = [(number + 0.5) * over_time.step_s for number in range(len(over_time.output_tok_s))]
    return [
        Chart("Time to first token, by when it was due", "s", "ms",
              [Series("TTFT", _thin(ttft_ms), "dots")], bounds=_bound(slo.ttft_s if slo else None)),
        Chart("Share of requests within a time to first token", "ms", "share",
              [Series("TTFT", _cumulative([value for _, value in ttft_ms]))], x_log=True),
        Chart("Share of ITLs within a time", "ms", "share",
              [Series("ITL", _cumulative(itls_ms), color=1)], x_log=True),
        Chart("Output tokens per second, over time", "s", "tokens/s",
              [Series("tokens/s", list(zip(moments, over_time.output_tok_s, strict=True)))]),
        Chart("Requests under way, over time", "s", "requests",
              [Series("under way", list(zip(moments, over_time.running, strict=True)), color=3)]),
        Chart("Tokens per answer against its time", "tokens", "end to end, s",
              [Series("answer", _thin([(r.output_tokens, r.e2e_s) for r in good]), "dots", 2)]),
    ]  # fmt: skip


def _errors(result: LevelResult) -> str:
    if not result.summary.errors:
        return ""
    rows = []
    for kind, count in result.summary.errors.items():
        example = next(r.error_detail for r in result.records if r.error == kind and r.measured)
        rows.append(f"<tr><td>{escape(kind)}</td><td>{count}</td><td>{escape(example)}</td></tr>")
    table = f"<table><tr><th>error</th><th>requests</th><th>for example</th></tr>{''.join(rows)}</table>"
    return f'<div class="card scroll" style="margin-top:14px">{table}</div>'


def _footnote(results: Sequence[LevelResult]) -> str:
    if not results:
        return '<p class="soft">No request ended.</p>'
    share = max(result.cpu_share for result in results)
    late = max((r.summary.lateness_s.p99 for r in results if r.summary.lateness_s), default=0.0)
    chunk = next((r.summary.tokens_per_chunk for r in results if r.summary.tokens_per_chunk), 1.0)
    return (
        f'<p class="soft" style="margin-top:30px">The generator took at most {share:.0%} of one core and sent '
        f"99% of requests within {show_duration(late)} of when they were due; latencies count from then. "
        f"A chunk carried {'one token' if chunk == 1 else f'{chunk:.3g} tokens on average'}.</p>"
    )


def _load_value(result: LevelResult) -> float:
    load = result.load
    if isinstance(load, int):
        return float(load)
    if isinstance(load, Arrivals):
        return load.rate
    return load.speed


def _milliseconds(spread: Spread | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name)) * 1e3


def _bound(seconds: float | None) -> tuple[tuple[str, float], ...]:
    return () if seconds is None else ((f"objective {show_duration(seconds)}", seconds * 1e3),)


def _cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """The empirical distribution, thinned to what a line can show."""
    if not values:
        return []
    ordered, last = sorted(values), min(MOST_POINTS, max(2, len(values))) - 1
    # At least a hundredth of a millisecond: the axis is logarithmic.
    return [(max(quantile(ordered, at / last), 0.01), at / last) for at in range(last + 1)]


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every n-th point, and all the highest: outliers are what one looks for."""
    if len(points) <= MOST_POINTS:
        return list(points)
    ranked = sorted(points, key=lambda point: -point[1])
    return [*ranked[:40], *points[:: -(-len(points) // MOST_POINTS)]]
