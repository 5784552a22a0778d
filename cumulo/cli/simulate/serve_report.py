"""The report of a simulated deployment: rows, a table of rates, a chart. `simulate serve` prints it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cumulo.base.files import write_text_file
from cumulo.base.quantities import quantity
from cumulo.base.report import Row, grid

if TYPE_CHECKING:
    from cumulo.plan.serve.capacity import RateTrial
    from cumulo.plan.serve.fleet import FleetReport
    from cumulo.plan.serve.goodput import Goodput
    from cumulo.plan.serve.report import ServeReport
    from cumulo.spec.slo import Slo
from collections.abc import Iterable
from typing import TYPE_CHECKING


def report_rows(
    result: "ServeReport",
    rate: float,
    slo: "Slo | None",
    between: "tuple[ServeReport, ServeReport] | None" = None,
) -> list[Row]:
    """`between`: the same with all steps as much faster and slower as the profile may be wrong."""

    def interval(pick: Callable[["ServeReport"], float], unit: str) -> str:
        if between is None:
            return ""
        # Queues are chaotic: slower steps can, by chance, make a percentile better.
        low, *_, high = sorted(map(pick, (result, *between)))
        return f"range {quantity(low, unit)} to {quantity(high, unit)}"

    rows = [
        Row(
            "request rate",
            finite(rate),
            "requests/s",
            "higher",
            note=f"{result.finished:,} of {result.requests:,} answered",
        ),
        Row(
            "output throughput",
            result.output_tok_s,
            "tok/s",
            "higher",
            note=interval(lambda one: one.output_tok_s, "tok/s"),
        ),
    ]
    for name, kind, bound in (
        ("TTFT", "ttft_s", slo.ttft_s if slo else None),
        ("ITL", "itl_s", slo.itl_s if slo else None),
        ("end-to-end latency", "e2e_s", None),
    ):
        if getattr(result, kind) is None:
            continue
        for label, field in (
            ("p50", "p50"),
            ("p90", "p90"),
            (f"p{slo.percentile if slo else 99:g}", "at_slo"),
        ):

            def pick(one: "ServeReport", kind: str = kind, field: str = field) -> float:
                return 1e3 * float(getattr(getattr(one, kind), field))

            must = None if bound is None or field != "at_slo" else 1e3 * bound
            rows.append(
                Row(f"{name} {label}", pick(result), "ms", "lower", must=must, note=interval(pick, "ms"))
            )
    shares = sorted(result.time_by_part.items(), key=lambda item: -item[1])[:3]
    words = ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares)
    rows += [
        Row("mean step time", 1e3 * result.mean_step_s, "ms", "lower", note=f"{result.bound_by}: {words}"),
        Row("device busy", 100 * result.device_busy, "%", "higher"),
        Row("running sequences, peak", result.most_running, "", "higher"),
        Row("KV cache usage, peak", 100 * result.kv_used, "%", "lower"),
        Row("prefix cache hit rate", 100 * result.cached_share, "%", "higher"),
        Row(
            "preemptions",
            result.preemptions,
            "",
            "lower",
            note=f"{result.recomputed_tokens:,} tokens recomputed",
        ),
    ]
    if result.drafted_tokens:
        share = 100 * result.accepted_tokens / result.drafted_tokens
        told = f"{result.accepted_tokens:,} of {result.drafted_tokens:,} drafted tokens"
        rows.append(Row("drafts accepted", share, "%", "higher", note=told))
    return rows


def finite(rate: float) -> float | None:
    """A trace whose requests all come at once has no rate."""
    return rate if math.isfinite(rate) else None


def capacity_rows(rate: float, users: float, think_s: float, bound: str) -> list[Row]:
    return [
        Row("highest rate within the SLO", rate, "requests/s", "higher", note=f"beyond it, {bound}"),
        Row(
            "concurrent users",
            float(f"{users:.3g}"),
            "users",
            "higher",
            note=f"each waits {think_s:g} s between an answer and the next question",
        ),
    ]


def effort_rows(simulated_s: float, cpu_s: float) -> list[Row]:
    return [
        Row(
            "simulation speed",
            simulated_s / cpu_s,
            "× real time",
            "higher",
            note=f"{quantity(simulated_s, 's')} simulated in {quantity(cpu_s, 's')} on one core",
        )
    ]


def sweep_table(trials: "list[RateTrial]", judged: bool) -> Any:
    """`judged`: there is an SLO to meet."""
    lines = []
    for one in trials:
        spreads = [spread for spread in (one.report.ttft_s, one.report.itl_s) if spread is not None]
        cells = [quantity(value, "s") for spread in spreads for value in (spread.p50, spread.p99)]
        verdict = Text("meets SLO", "green") if one.holds else Text("misses SLO", "red")
        cells += [""] * (4 - len(cells))
        lines.append(
            [f"{one.rate:.4g}", f"{one.report.output_tok_s:,.0f}", *cells, verdict if judged else ""]
        )
    headings = ("requests/s", "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "")
    return grid(headings, lines, left=())


def goodput_table(found: "list[tuple[float, str, Goodput]]") -> Any:
    """One line for each rate and way to schedule."""
    headings = ("requests/s", "scheduling", "goodput", "refused", "kept", "late TTFT", "late ITL")
    lines = [
        (
            f"{rate:.4g}",
            name,
            f"{one.request_s:.4g}/s",
            f"{1 - one.admitted / one.requests:.1%}",
            f"{one.kept_share:.2%}",
            f"{one.missed_ttft / one.requests:.1%}",
            f"{one.missed_itl / one.requests:.1%}",
        )
        for rate, name, one in found
    ]
    return grid(headings, lines, left=(1,))


def goodput_rows(found: "list[tuple[float, str, Goodput]]") -> list[Row]:
    return [
        row
        for rate, name, one in found
        for row in (
            Row(f"{name}: goodput at {rate:.4g} requests/s", one.request_s, "requests/s", "higher"),
            Row(f"{name}: promises kept at {rate:.4g} requests/s", 100 * one.kept_share, "%", "higher"),
        )
    ]


def fleet_table(found: "list[FleetReport]") -> Any:
    """One line for each routing policy."""
    headings = ("router", "tok/s", "TTFT p50", "TTFT p99", "ITL p99", "cached", "reuse", "busiest")
    lines = [
        (
            one.router,
            f"{one.output_tok_s:,.0f}",
            quantity(one.ttft_s.p50, "s") if one.ttft_s else "",
            quantity(one.ttft_s.p99, "s") if one.ttft_s else "",
            quantity(one.itl_s.p99, "s") if one.itl_s else "",
            f"{one.cached_share:.1%}",
            f"{one.reuse:.0%}",
            f"{one.load_over_mean:.2f} ×",
        )
        for one in found
    ]
    return grid(headings, lines)


def fleet_note(one: "FleetReport") -> str:
    return (
        f"cached: share of prompt tokens found in the prefix cache. reuse: of the {one.shared_cache_share:.1%} "
        f"that one cache as large as all {one.replicas} replicas' would find. busiest: tokens computed by the "
        "busiest replica, over the mean."
    )


def fleet_rows(one: "FleetReport") -> list[Row]:
    rows = [
        Row(f"{one.router}: output throughput", one.output_tok_s, "tok/s", "higher"),
        Row(f"{one.router}: cached prompt tokens", 100 * one.cached_share, "%", "higher"),
        Row(f"{one.router}: reuse, of a shared cache's", 100 * one.reuse, "%", "higher"),
        Row(f"{one.router}: busiest replica, over the mean", one.load_over_mean, "×", "lower"),
    ]
    for name, spread in (("TTFT", one.ttft_s), ("ITL", one.itl_s)):
        if spread is not None:
            rows += [
                Row(f"{one.router}: {name} p50", 1e3 * spread.p50, "ms", "lower"),
                Row(f"{one.router}: {name} p99", 1e3 * spread.p99, "ms", "lower"),
            ]
    return rows


def write_picture(path: Path, trials: "list[RateTrial]", slo: "Slo | None", title: str) -> None:
    """Draw percentiles of TTFT and ITL over the request rate."""
    from cumulo.base.chart import chart_file

    reports = ((one.rate, one.report) for one in sorted(trials, key=lambda one: one.rate))
    write_text_file(path, chart_file(latency_chart(title, "requests per second", reports, slo)))


if TYPE_CHECKING:
    from cumulo.base.chart import Chart
    from cumulo.plan.serve.report import ServeReport
    from cumulo.spec.slo import Slo

_LINES = (
    ("TTFT", "ttft_s", "p50"),
    ("TTFT", "ttft_s", "p99"),
    ("ITL", "itl_s", "p50"),
    ("ITL", "itl_s", "p99"),
)


def latency_chart(
    title: str, load: str, reports: "Iterable[tuple[float, ServeReport]]", slo: "Slo | None"
) -> "Chart":
    """`reports`: each with its load, ascending. Latencies are logarithmic, which shows the knee."""
    from cumulo.base.chart import Chart, Series

    played = list(reports)
    series = []
    for color, (name, field, percentile) in enumerate(_LINES):
        points = [
            (x, 1e3 * getattr(spread, percentile))
            for x, report in played
            if (spread := getattr(report, field)) is not None
        ]
        series.append(Series(f"{name} {percentile}", points, "both", color))
    limits = () if slo is None else (("TTFT", slo.ttft_s), ("ITL", slo.itl_s))
    bounds = [(f"{name} ≤ {1e3 * bound:g} ms", 1e3 * bound) for name, bound in limits if bound is not None]
    return Chart(title, load, "milliseconds", series, y_log=True, bounds=bounds)
