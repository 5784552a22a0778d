"""Every published row predicted again: errors and interval coverage by source, and a scatter plot.
`cumulo plan validate` prints what this finds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cumulo.base.chart import COLORS, Chart, Series, chart_file
from cumulo.base.quantiles import quantile
from cumulo.plan.evidence import weights as evidence
from cumulo.plan.evidence.published import PublishedRow
from cumulo.plan.job import TrainJob
from cumulo.plan.time import compute_profile
from cumulo.plan.time.compute_profile import Profile
from cumulo.plan.time.efficiency import composed, generation_of, left_out_efficiency, shipped_efficiency
from cumulo.plan.time.step import step_time

# The bar that the planner is held to, over rows whose generation of software the constants have never seen.
MEDIAN_BAR, P90_BAR, COVERAGE_BAR, WIDTH_BAR = 0.08, 0.18, (0.85, 0.95), 1.6


@dataclass(frozen=True, slots=True)
class RowPrediction:
    row: PublishedRow
    predicted_s: float
    half_width: float  # of the 90% interval, as a logarithm

    @property
    def error(self) -> float:
        """+0.05: the step is predicted 5% longer than it was."""
        return self.predicted_s / self.row.step_s - 1

    @property
    def covered(self) -> bool:
        return abs(math.log(self.predicted_s / self.row.step_s)) <= self.half_width

    @property
    def width(self) -> float:
        """The interval's high end over its low one."""
        return math.exp(2 * self.half_width)


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors of some rows. `bias`: the median error with its sign."""

    name: str
    rows: int
    median: float
    p90: float
    worst: float
    worst_row: str
    bias: float
    coverage: float
    width: float  # of the intervals, high over low, in the median


def predict(row: PublishedRow) -> RowPrediction:
    """Predicts as `cumulo plan train` does for a job of this software."""
    profile, borrowed = compute_profile.shipped_for(row.cluster.device, row.job.dtype, row.job.software)
    return _predicted(row, profile, bool(borrowed), ())


def predict_left_out(row: PublishedRow, measured_with: str | None = None) -> RowPrediction:
    """Predicts as if the row's generation of software had published nothing: constants fitted without it, its
    traits alone, and an interval for which only the others vouch. `measured_with`: the software of the row,
    where it is asked for under the name of another."""
    generation, device = generation_of(measured_with or row.job.software), row.cluster.device
    given = left_out_efficiency(generation)
    software = given.software[row.job.software]
    profile = composed(software, device.generation, row.job.dtype, device, given)
    return _predicted(row, profile, False, (generation,))


def predict_unnamed(
    row: PublishedRow, jobs: Sequence[tuple[float, TrainJob]], left_out: bool
) -> RowPrediction:
    """With the software not named, and an interval for which such predictions of other generations vouch."""
    without = (generation_of(row.job.software),) if left_out else ()
    width = evidence.half_width(jobs[0][1], row.cluster, without=without, unnamed=True)
    return RowPrediction(row, unnamed_s(row, jobs, left_out), width)


def unnamed_s(row: PublishedRow, jobs: Sequence[tuple[float, TrainJob]], left_out: bool) -> float:
    """The geometric mean over jobs as likely software does them, with their probabilities."""
    device = row.cluster.device
    given = left_out_efficiency(generation_of(row.job.software)) if left_out else shipped_efficiency()
    logs = 0.0
    for probability, job in jobs:
        profile = composed(given.software[job.software], device.generation, job.dtype, device, given)
        logs += probability * math.log(step_time(job, row.cluster, profile, play=True).step_s)
    return math.exp(logs)


def _predicted(
    row: PublishedRow, profile: Profile, borrowed: bool, without: tuple[str, ...]
) -> RowPrediction:
    time = step_time(row.job, row.cluster, profile, play=True)
    width = evidence.half_width(row.job, row.cluster, borrowed, without=without)
    return RowPrediction(row, time.step_s, width)


def summarise(name: str, predictions: Sequence[RowPrediction]) -> ErrorSummary:
    sizes = sorted(abs(prediction.error) for prediction in predictions)
    worst = max(predictions, key=lambda prediction: abs(prediction.error))
    return ErrorSummary(
        name=name,
        rows=len(sizes),
        median=quantile(sizes, 0.5),
        p90=quantile(sizes, 0.9),
        worst=worst.error,
        worst_row=worst.row.name,
        bias=quantile(sorted(prediction.error for prediction in predictions), 0.5),
        coverage=sum(prediction.covered for prediction in predictions) / len(predictions),
        width=quantile(sorted(prediction.width for prediction in predictions), 0.5),
    )


def by_source(predictions: Sequence[RowPrediction]) -> list[ErrorSummary]:
    """One for each source, in the order they come, then all."""
    names = dict.fromkeys(prediction.row.source for prediction in predictions)
    groups: list[tuple[str, list[RowPrediction]]] = [
        (name, [each for each in predictions if each.row.source == name]) for name in names
    ]
    groups.append(("all", list(predictions)))
    return [summarise(name, some) for name, some in groups if some]


# -- the picture ------------------------------------------------------------------------------------------------
def scatter_svg(predictions: Iterable[RowPrediction]) -> str:
    """Predicted over published step time, both logarithmic: the line in the middle is right, the others are
    ±15%."""
    sources: dict[str, list[RowPrediction]] = {}
    for one in predictions:
        sources.setdefault(one.row.source, []).append(one)
    published = [one.row.step_s for some in sources.values() for one in some]
    ends = (min(published), max(published))
    series = [
        Series(name, [(value, value * factor) for value in ends], color=7)
        for name, factor in (("as published", 1.0), ("15% longer", 1.15), ("15% shorter", 1 / 1.15))
    ]
    for index, (name, some) in enumerate(sources.items()):
        points = [(one.row.step_s, one.predicted_s) for one in some]
        tips = [
            f"{one.row.name}: published {one.row.step_s:.3g} s, predicted {one.predicted_s:.3g} s "
            f"({one.error:+.1%})"
            for one in some
        ]
        series.append(Series(name, points, "dots", index % len(COLORS), tips))
    title = "predicted against published step time"
    return chart_file(Chart(title, "published step time, s", "predicted step time, s", series, True, True))
