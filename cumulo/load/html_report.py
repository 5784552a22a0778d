"""The report as one HTML page that needs nothing but itself: tables, inline SVG, light and dark.

Called by the command line with a campaign's results. Plots are thinned, so that a page stays small.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cumulo.base.chart import Chart, Series
from cumulo.base.figures import RunFigure, figure_html
from cumulo.base.page import card, html_table
from cumulo.base.page import page as base_page
from cumulo.base.quantiles import quantile
from cumulo.base.quantities import quantity
from cumulo.load.campaign import LevelResult
from cumulo.load.schedule import Arrivals
from cumulo.load.summary import timeline
from cumulo.spec.slo import Slo

MOST_POINTS = 400


def page(
    title: str, facts: Mapping[str, str], results: Sequence[LevelResult], slo: Slo | None, found: float | None
) -> str:
    """The whole page. `facts` are shown in the head; `found` is what the search has found."""
    parts = [f'<p class="soft">{escape(name)}: {escape(value)}</p>' for name, value in facts.items()]
    if slo is not None:
        parts.append(f"<p>Objective: {escape(str(slo))}</p>")
    if found is not None:
        parts.append(f'<p class="green">Highest rate that holds it: <b>{found:.3g} requests/s</b></p>')
    named = [(result.label, result) for result in results]
    if len(results) == 1:
        parts.append(_tiles(results[0]))
    parts += ["<h2>Levels</h2>", figure_html("load", named, level_figures(slo is not None, whole=True))]
    if len(results) > 1:
        parts += ["<h2>Against the load</h2>", _cards(_sweep_charts(results, slo, found))]
        for result in results:
            heading = f"{result.label}{' (ended early)' if result.stopped else ''}"
            body = _cards(_level_charts(result, slo)) + _errors(result)
            parts.append(f"<details><summary>{escape(heading)}</summary>{body}</details>")
    elif results:
        parts += ["<h2>In detail</h2>", _cards(_level_charts(results[0], slo)), _errors(results[0])]
    parts.append(_footnote(results))
    return base_page(title, *parts)


def _tiles(result: LevelResult) -> str:
    summary = result.summary
    tiles = [
        (f"{summary.output_tok_s:,.4g}", "output tokens/s"),
        (f"{summary.completed_req_s:,.3g}", "requests/s completed"),
    ]
    for name, spread in (("time to first token", summary.ttft_s), ("between tokens", summary.itl_s)):
        if spread is not None:
            tiles += [
                (quantity(spread.p50, "s"), f"{name}, p50"),
                (quantity(spread.p99, "s"), f"{name}, p99"),
            ]
    if summary.goodput_req_s is not None and summary.slo_share is not None:
        tiles.append((f"{summary.goodput_req_s:,.3g}", f"good requests/s ({summary.slo_share:.1%})"))
    tiles.append((f"{result.failed}", f"of {summary.requests} requests failed"))
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{escape(name)}</span></div>' for value, name in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def level_figures(with_slo: bool, whole: bool) -> list[RunFigure]:
    """Columns of levels side by side; `whole`: also those for which a terminal has no room."""

    def latency(name: str, kind: str, part: str) -> RunFigure:
        return RunFigure(
            "", lambda one: getattr(getattr(one.summary, kind), part, None), "s", heading=f"{name}\n{part}"
        )

    columns = [
        RunFigure("", lambda one: one.summary.requests, heading="sent"),
        RunFigure("", lambda one: one.failed, heading="fail", style=lambda failed: "red" if failed else None),
        RunFigure("", lambda one: one.summary.completed_req_s, heading="req/s"),
        RunFigure("", lambda one: one.summary.output_tok_s, heading="tok/s"),
        *(latency(*kind, part) for kind in (("TTFT", "ttft_s"), ("ITL", "itl_s")) for part in ("p50", "p99")),
    ]
    if whole:
        columns += [latency("TPOT", "tpot_s", "p50"), latency("end to end", "e2e_s", "p99")]
    if whole or not with_slo:
        columns.append(latency("end to end", "e2e_s", "p50"))
    if with_slo:
        colours = {"holds": "green", "fails": "red"}
        columns += [
            RunFigure("", lambda one: one.summary.slo_share, heading="met\nSLO", shown="{:.1%}"),
            RunFigure("", lambda one: one.summary.goodput_req_s, heading="good/s"),
            RunFigure(
                "",
                lambda one: one.verdict and one.verdict + " early" * one.stopped,
                heading="verdict",
                shown="{}",
                style=lambda verdict: colours.get(verdict.split()[0]),
            ),
        ]
    return columns


def _cards(charts: Sequence[Chart]) -> str:
    return f'<div class="cards">{"".join(map(card, charts))}</div>'


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
            over_load(
                name, color, lambda r, n=name: (one := getattr(r.summary, figure)) and getattr(one, n) * 1e3
            )
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
    examples = {r.error: r.error_detail for r in reversed(result.records) if r.error and r.measured}
    lines = [(kind, str(count), examples[kind]) for kind, count in result.summary.errors.items()]
    return html_table(("error", "requests", "for example"), lines)


def _footnote(results: Sequence[LevelResult]) -> str:
    if not results:
        return '<p class="soft">No request ended.</p>'
    share = max(result.cpu_share for result in results)
    late = max((r.summary.lateness_s.p99 for r in results if r.summary.lateness_s), default=0.0)
    chunk = next((r.summary.tokens_per_chunk for r in results if r.summary.tokens_per_chunk), 1.0)
    return (
        f'<p class="soft" style="margin-top:30px">The generator took at most {share:.0%} of one core and sent '
        f"99% of requests within {quantity(late, 's')} of when they were due; latencies count from then. "
        f"A chunk carried {'one token' if chunk == 1 else f'{chunk:.3g} tokens on average'}.</p>"
    )


def _load_value(result: LevelResult) -> float:
    load = result.load
    if isinstance(load, int):
        return float(load)
    if isinstance(load, Arrivals):
        return load.rate
    return load.speed


def _bound(seconds: float | None) -> tuple[tuple[str, float], ...]:
    return () if seconds is None else ((f"objective {quantity(seconds, 's')}", seconds * 1e3),)


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
