"""The report of a simulated deployment: rows, and tables of rates, routers and promises."""

import math
from collections.abc import Sequence

from rich.table import Table

from cumulo.base.figures import RunFigure, figure_rows, figure_table
from cumulo.base.quantities import quantity
from cumulo.base.report import Row
from cumulo.cli.shared.figures import latency_rows, range_words, trial_columns
from cumulo.plan.serve.capacity import RateTrial
from cumulo.plan.serve.report import ServeReport
from cumulo.spec.slo import Slo

_KINDS = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("end-to-end latency", "e2e_s"))
_USE = (
    RunFigure("device busy", lambda one: 100 * one.device_busy, "%"),
    RunFigure("running sequences, peak", lambda one: one.most_running),
    RunFigure("KV cache usage, peak", lambda one: 100 * one.kv_used, "%", "lower"),
    RunFigure("prefix cache hit rate", lambda one: 100 * one.cached_share, "%"),
)
FLEET = (
    RunFigure("output throughput", lambda one: one.output_tok_s, "tok/s", heading="tok/s", shown="{:,.0f}"),
    RunFigure("TTFT p50", lambda one: one.ttft_s and 1e3 * one.ttft_s.p50, "ms", "lower", "TTFT p50"),
    RunFigure("TTFT p99", lambda one: one.ttft_s and 1e3 * one.ttft_s.p99, "ms", "lower", "TTFT p99"),
    RunFigure("ITL p50", lambda one: one.itl_s and 1e3 * one.itl_s.p50, "ms", "lower"),
    RunFigure("ITL p99", lambda one: one.itl_s and 1e3 * one.itl_s.p99, "ms", "lower", "ITL p99"),
    RunFigure(
        "cached prompt tokens", lambda one: 100 * one.cached_share, "%", heading="cached", shown="{:.1f}%"
    ),
    RunFigure(
        "reuse, of a shared cache's", lambda one: 100 * one.reuse, "%", heading="reuse", shown="{:.0f}%"
    ),
    RunFigure(
        "busiest replica, over the mean", lambda one: one.load_over_mean, "×", "lower", "busiest", "{:.2f} ×"
    ),
)
# Of a rate and the goodput at it.
GOODPUT = (
    RunFigure("goodput", lambda one: one.request_s, "requests/s", heading="goodput", shown="{:.4g}/s"),
    RunFigure("", lambda one: 1 - one.admitted / one.requests, heading="refused", shown="{:.1%}"),
    RunFigure("promises kept", lambda one: 100 * one.kept_share, "%", heading="kept", shown="{:.2f}%"),
    RunFigure("", lambda one: one.missed_ttft / one.requests, heading="late TTFT", shown="{:.1%}"),
    RunFigure("", lambda one: one.missed_itl / one.requests, heading="late ITL", shown="{:.1%}"),
)


def report_rows(reports: Sequence[ServeReport], rate: float, slo: Slo | None) -> list[Row]:
    """The first report's figures; the others are the same with all steps as much faster and slower as the profile
    may be wrong."""
    result = reports[0]
    answered = f"{result.finished:,} of {result.requests:,} answered"
    throughput = range_words(lambda one: one.output_tok_s, reports, "tok/s")
    shares = sorted(result.time_by_part.items(), key=lambda item: -item[1])[:3]
    parts = f"{result.bound_by}: " + ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares)
    rows = [
        Row("request rate", finite(rate), "requests/s", note=answered),
        Row("output throughput", result.output_tok_s, "tok/s", note=throughput),
        *latency_rows(reports, slo, _KINDS, ("p50", "p90")),
        Row("mean step time", 1e3 * result.mean_step_s, "ms", "lower", note=parts),
        *figure_rows("", result, _USE),
    ]
    recomputed = f"{result.recomputed_tokens:,} tokens recomputed"
    rows.append(Row("preemptions", result.preemptions, "", "lower", note=recomputed))
    if result.drafted_tokens:
        share = 100 * result.accepted_tokens / result.drafted_tokens
        told = f"{result.accepted_tokens:,} of {result.drafted_tokens:,} drafted tokens"
        rows.append(Row("drafts accepted", share, "%", note=told))
    return rows


def finite(rate: float) -> float | None:
    """A trace whose requests all come at once has no rate."""
    return rate if math.isfinite(rate) else None


def capacity_rows(rate: float, users: float, think_s: float, bound: str) -> list[Row]:
    think = f"each waits {think_s:g} s between an answer and the next question"
    return [
        Row("highest rate within the SLO", rate, "requests/s", note=f"beyond it, {bound}"),
        Row("concurrent users", float(f"{users:.3g}"), "users", note=think),
    ]


def effort_row(simulated_s: float, cpu_s: float) -> Row:
    note = f"{quantity(simulated_s, 's')} simulated in {quantity(cpu_s, 's')} on one core"
    return Row("simulation speed", simulated_s / cpu_s, "× real time", note=note)


def sweep_table(trials: Sequence[RateTrial], judged: bool) -> Table:
    """`judged`: there is an SLO to meet."""
    throughput = RunFigure("", lambda one: one.report.output_tok_s, heading="tok/s", shown="{:,.0f}")
    named = [(f"{one.rate:.4g}", one) for one in trials]
    return figure_table("requests/s", named, (throughput, *trial_columns(judged)))
