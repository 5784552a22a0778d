"""How `cumulo simulate autoscale` shows its runs: a table, rows, a picture of replicas and load over time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from cumulo.base import svg
from cumulo.base.files import write_text_file
from cumulo.base.quantities import quantity
from cumulo.base.report import Row, grid
from cumulo.fleet.simulate.autoscaled_fleet import ScaledRun, ScaleLook
from cumulo.plan.serve.report import Percentiles
from cumulo.spec.slo import Slo

_WIDTH, _BAND, _LEFT, _TOP = 900.0, 150.0, 60.0, 34.0
_STYLE = (
    "<style>svg{background:#fff;font:12px sans-serif}.ready{fill:#bfdbfe;stroke:#2563eb}.start{fill:#fde68a;"
    "stroke:#f59e0b}.load{fill:none;stroke:#059669;stroke-width:1.5}.late{fill:#dc2626}.axis{stroke:#888}</style>"
)


KEY = (
    "hours: of replicas, from their order until they have drained. most: replicas at the same time. starts: "
    "replicas that were started. turns: changes against the direction of the one before. lost: requests without an "
    "answer."
)


def run_rows(run: ScaledRun, slo: Slo, price_per_hour: float) -> list[Row]:
    ttft = Percentiles.from_values(run.ttft_s, percentile=slo.percentile)
    rows = [
        Row(f"{run.rule}: replica-hours", run.replica_hours, "h", "lower"),
        Row(f"{run.rule}: SLO attainment", 100 * run.attainment, "%", "higher"),
        Row(f"{run.rule}: replicas started", run.starts, "", "lower"),
        Row(f"{run.rule}: reversals", run.reversals, "", "lower"),
        Row(f"{run.rule}: requests lost", run.requests - run.answered, "", "lower"),
    ]
    if price_per_hour:
        rows.append(Row(f"{run.rule}: cost", run.replica_hours * price_per_hour, "USD", "lower"))
    if ttft is not None:
        rows.append(Row(f"{run.rule}: TTFT p{slo.percentile:g}", ttft.at_slo, "s", "lower"))
    return rows


def comparison(runs: Sequence[ScaledRun], slo: Slo, price_per_hour: float) -> Table:
    """One line for each rule, in at most 80 columns; `KEY` explains the headings."""
    headings = (
        "rule",
        "hours",
        "cost",
        "in SLO",
        f"TTFT p{slo.percentile:g}",
        "most",
        "starts",
        "turns",
        "lost",
    )
    lines = []
    for run in runs:
        ttft = Percentiles.from_values(run.ttft_s, percentile=slo.percentile)
        lines.append((
            run.rule, f"{run.replica_hours:.2f}", f"${run.replica_hours * price_per_hour:.2f}",
            f"{run.attainment:.1%}", quantity(ttft.at_slo, "s") if ttft else "–", str(run.most),
            str(run.starts), str(run.reversals), f"{run.requests - run.answered:,}",
        ))  # fmt: skip
    return grid(headings, lines)


def write_picture(path: Path, runs: Sequence[ScaledRun]) -> None:
    """One band per rule: replicas that are ready or start, requests per second, and when requests were late."""
    end_s = max(run.looks[-1].time_s for run in runs if run.looks)
    most = max(look.ready + look.starting for run in runs for look in _together(run.looks))
    inside = [_band(run, at, end_s, most) for at, run in enumerate(runs)]
    height = _TOP + (_BAND + 30) * len(runs) + 20
    legend = svg.text(
        _LEFT,
        16,
        "blue: ready replicas, yellow: starting; green: requests/s; red: requests that missed the SLO",
    )
    text = svg.picture(
        _WIDTH + _LEFT + 20,
        height,
        _STYLE,
        legend,
        *inside,
        label="replicas and load over time",
        xmlns=svg.XMLNS,
    )
    write_text_file(path, text)


def _band(run: ScaledRun, at: int, end_s: float, most: int) -> str:
    bottom = _TOP + (_BAND + 30) * at + _BAND

    def x(time_s: float) -> float:
        return _LEFT + _WIDTH * time_s / end_s

    def y(count: float) -> float:
        return bottom - _BAND * count / max(1, most)

    looks = _together(run.looks)
    interval_s = looks[0].time_s
    rates = [look.arrived / interval_s for look in looks]
    top_rate = max(rates) or 1.0
    load = [
        (x(look.time_s), bottom - 0.9 * _BAND * rate / top_rate)
        for look, rate in zip(looks, rates, strict=True)
    ]
    late = [
        svg.dot(x(look.time_s), bottom + 6, 1 + 3 * (look.ended - look.ended_in_slo) / max(1, look.ended),
                f"{look.ended - look.ended_in_slo} of {look.ended} late", class_="late")
        for look in looks
        if look.ended > look.ended_in_slo
    ]  # fmt: skip
    title = f"{run.rule}: {run.replica_hours:.2f} replica-hours, {100 * run.attainment:.1f}% within the SLO"
    return "".join(
        [
            svg.polygon(
                _steps([(x(one.time_s), y(one.ready + one.starting)) for one in looks], bottom), "start"
            ),
            svg.polygon(_steps([(x(one.time_s), y(one.ready)) for one in looks], bottom), "ready"),
            svg.polyline(load, "load"),
            *late,
            svg.line(_LEFT, bottom, _LEFT + _WIDTH, bottom, "axis"),
            svg.text(_LEFT, bottom - _BAND - 4, title, font_weight="bold"),
            svg.text(_LEFT - 6, bottom, "0", "end"),
            svg.text(_LEFT - 6, bottom - _BAND + 10, f"{most}", "end"),
            svg.text(_LEFT + _WIDTH, bottom + 18, f"{end_s / 60:.0f} min", "end"),
            svg.text(_LEFT + _WIDTH, bottom - 0.9 * _BAND - 4, f"{top_rate:.1f} requests/s", "end"),
        ]
    )


def _together(looks: Sequence[ScaleLook]) -> list[ScaleLook]:
    """Roles that were looked at in the same moment as one: their replicas are added."""
    found: list[ScaleLook] = []
    for look in looks:
        if found and found[-1].time_s == look.time_s:
            last = found[-1]
            found[-1] = replace(last, ready=last.ready + look.ready, starting=last.starting + look.starting)
        else:
            found.append(look)
    return found


def _steps(points: list[tuple[float, float]], bottom: float) -> list[tuple[float, float]]:
    made = [(points[0][0], bottom)]
    for (x, y), (next_x, _) in zip(points, [*points[1:], points[-1]], strict=True):
        made += [(x, y), (next_x, y)]
    return [*made, (points[-1][0], bottom)]
