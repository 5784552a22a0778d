"""Percentiles of TTFT and ITL over load, with the SLO's bounds. `simulate serve` and `plan serve` draw it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

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
