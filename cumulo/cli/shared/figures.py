"""Latencies of simulated serving as columns, rows and a chart: `cumulo simulate serve` and `cumulo plan serve`."""

from collections.abc import Callable, Iterable, Sequence

from cumulo.base.chart import Chart, Series
from cumulo.base.figures import RunFigure
from cumulo.base.quantities import between
from cumulo.base.report import Row
from cumulo.plan.serve.capacity import RateTrial
from cumulo.plan.serve.report import ServeReport
from cumulo.spec.slo import Slo


def trial_columns(judged: bool = True) -> list[RunFigure]:
    """Columns of a `RateTrial`: its latencies and, where there is an SLO, whether it is met."""

    def latency(kind: str, part: str) -> RunFigure:
        def pick(trial: RateTrial) -> float | None:
            return getattr(getattr(trial.report, kind), part, None)

        return RunFigure("", pick, "s", heading=f"{kind.removesuffix('_s').upper()} {part}")

    columns = [latency(kind, part) for kind in ("ttft_s", "itl_s") for part in ("p50", "p99")]
    verdict = RunFigure("", lambda one: "yes" if one.holds else "no", heading="meets SLO", shown="{}")
    return [*columns, verdict] if judged else columns


def range_words(pick: Callable[[ServeReport], float], reports: Iterable[ServeReport], unit: str) -> str:
    """From the most optimistic to the most pessimistic prediction."""
    # Queues are chaotic: slower steps can, by chance, make a percentile better.
    low, *_, high = sorted(map(pick, reports))
    return f"range {between(low, high, unit)}"


def latency_rows(
    reports: Sequence[ServeReport],
    slo: Slo | None,
    kinds: Sequence[tuple[str, str]],
    percentiles: Sequence[str],
) -> list[Row]:
    """Percentiles of the first report, with the range of all; the SLO's percentile must keep the SLO."""
    found = []
    for name, kind in kinds:
        bound = getattr(slo, kind, None)
        if getattr(reports[0], kind) is None:
            continue
        for field in (*percentiles, "at_slo"):
            label = f"p{slo.percentile if slo else 99:g}" if field == "at_slo" else field

            def pick(one: ServeReport, kind: str = kind, field: str = field) -> float:
                return 1e3 * float(getattr(getattr(one, kind), field))

            must = None if bound is None or field != "at_slo" else 1e3 * bound
            note = range_words(pick, reports, "ms") if len(reports) > 1 else ""
            found.append(Row(f"{name} {label}", pick(reports[0]), "ms", "lower", must=must, note=note))
    return found


def latency_chart(
    title: str, load: str, reports: Iterable[tuple[float, ServeReport]], slo: Slo | None
) -> Chart:
    """`reports`: each with its load, ascending. Latencies are logarithmic, which shows the knee."""
    played = list(reports)
    kinds = [
        (name, kind, part) for name, kind in (("TTFT", "ttft_s"), ("ITL", "itl_s")) for part in ("p50", "p99")
    ]
    series = []
    for color, (name, field, percentile) in enumerate(kinds):
        points = [
            (x, 1e3 * getattr(spread, percentile))
            for x, report in played
            if (spread := getattr(report, field)) is not None
        ]
        series.append(Series(f"{name} {percentile}", points, "both", color))
    limits = () if slo is None else (("TTFT", slo.ttft_s), ("ITL", slo.itl_s))
    bounds = [(f"{name} ≤ {1e3 * bound:g} ms", 1e3 * bound) for name, bound in limits if bound is not None]
    return Chart(title, load, "milliseconds", series, y_log=True, bounds=bounds)
