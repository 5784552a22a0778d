"""How `cumulo simulate autoscale` shows its runs: figures, and a chart of replicas and load over time."""

from collections.abc import Sequence
from itertools import groupby, pairwise

from cumulo.base.chart import Chart, Series
from cumulo.base.figures import RunFigure
from cumulo.fleet.simulate.autoscaled_fleet import ScaledRun
from cumulo.plan.serve.report import Percentiles
from cumulo.spec.slo import Slo

KEY = (
    "hours: of replicas, from their order until they have drained. most: replicas at the same time. starts: "
    "replicas that were started. turns: changes against the direction of the one before. lost: requests without an "
    "answer."
)


def figures(slo: Slo, price_per_hour: float) -> tuple[RunFigure, ...]:
    """What is compared of each rule, in at most 80 columns; `KEY` explains the headings."""

    def ttft_s(run: ScaledRun) -> float | None:
        spread = Percentiles.from_values(run.ttft_s, percentile=slo.percentile)
        return None if spread is None else spread.at_slo

    def cost(run: ScaledRun) -> float | None:
        return run.replica_hours * price_per_hour if price_per_hour else None

    ttft = f"TTFT p{slo.percentile:g}"
    return (
        RunFigure("replica-hours", lambda run: run.replica_hours, "h", "lower", "hours", "{:.2f}"),
        RunFigure("cost", cost, "USD", "lower", "cost", "${:.2f}"),
        RunFigure("SLO attainment", lambda run: 100 * run.attainment, "%", heading="in SLO", shown="{:.1f}%"),
        RunFigure(ttft, ttft_s, "s", "lower", ttft),
        RunFigure("", lambda run: run.most, heading="most"),
        RunFigure("replicas started", lambda run: run.starts, "", "lower", "starts"),
        RunFigure("reversals", lambda run: run.reversals, "", "lower", "turns"),
        RunFigure("requests lost", lambda run: run.requests - run.answered, "", "lower", "lost"),
    )


def replicas_chart(runs: Sequence[ScaledRun]) -> Chart:
    """Ready replicas under each rule, where requests missed the SLO, and the load, which is the same for all."""
    series, load = [], list[tuple[float, float]]()
    for color, run in enumerate(runs, 1):
        # Roles that were looked at in the same moment count as one: their replicas are added.
        moments = [list(looks) for _, looks in groupby(run.looks, key=lambda look: look.time_s)]
        ready = [(looks[0].time_s / 60, sum(look.ready for look in looks)) for looks in moments]
        steps = [point for (x, y), (after, _) in pairwise(ready) for point in ((x, y), (after, y))]
        late = [
            (point, f"{looks[0].ended - looks[0].ended_in_slo} of {looks[0].ended} late")
            for point, looks in zip(ready, moments, strict=True)
            if looks[0].ended > looks[0].ended_in_slo
        ]
        hours = f"{run.rule}: {run.replica_hours:.2f} replica-hours, {run.attainment:.1%} within the SLO"
        series.append(Series(hours, steps or ready, "line", color))
        series.append(
            Series(
                f"{run.rule}: late requests", [at for at, _ in late], "dots", color, [tip for _, tip in late]
            )
        )
        load = load or [(looks[0].time_s / 60, looks[0].arrived / moments[0][0].time_s) for looks in moments]
    load_line = Series("requests/s", load, "line", 0)
    return Chart("Replicas and load over time", "minutes", "ready replicas", [load_line, *series])
