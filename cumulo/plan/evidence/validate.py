"""Every published row predicted again: errors and interval coverage by source, and a scatter plot.
`cumulo plan validate` prints what this finds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from cumulo.base import svg
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
    """As `cumulo plan train` does it for a job of this software."""
    profile, borrowed = compute_profile.shipped_for(row.cluster.device, row.job.dtype, row.job.software)
    return _predicted(row, profile, bool(borrowed), ())


def predict_left_out(row: PublishedRow, measured_with: str | None = None) -> RowPrediction:
    """As if the row's generation of software had published nothing: constants fitted without it, its traits alone,
    and an interval for which only the others vouch. `measured_with`: the software of the row, where it is asked for
    under the name of another."""
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
_SIZE, _LEFT, _BOTTOM, _TOP, _LEGEND = 520, 64, 52, 18, 190
_COLOURS = (
    "#2b6cb0",
    "#c05621",
    "#2f855a",
    "#b83280",
    "#6b46c1",
    "#0987a0",
    "#975a16",
    "#4a5568",
    "#e53e3e",
    "#38a169",
)


def scatter_svg(predictions: Iterable[RowPrediction]) -> str:
    """Predicted over published step time, both logarithmic: the diagonal is right, the band is ±15%."""
    points = list(predictions)
    values = [value for point in points for value in (point.predicted_s, point.row.step_s)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    side = _SIZE - _LEFT - 20

    def x(seconds: float) -> float:
        return _LEFT + (math.log10(seconds) - low) / (high - low) * side

    def y(seconds: float) -> float:
        return _TOP + side - (math.log10(seconds) - low) / (high - low) * side

    width, height = _SIZE + _LEGEND, _TOP + side + _BOTTOM
    parts = [
        "<style>text{fill:#1a202c}.f{stroke:#a0aec0;fill:none}.b{fill:#cbd5e0;opacity:.5}.bg{fill:#fff}"
        "@media(prefers-color-scheme:dark){text{fill:#e2e8f0}.bg{fill:#1a202c}.b{fill:#4a5568}}</style>",
        f'<rect class="bg" width="{width}" height="{height}"/>',
    ]
    near, far = 10.0**low, 10.0**high
    band = [
        (near, near * 1.15),
        (far / 1.15, far),
        (far, far),
        (far, far / 1.15),
        (near * 1.15, near),
        (near, near),
    ]
    parts.append(f'<polygon class="b" points="{" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in band)}"/>')
    parts.append(
        f'<line class="f" x1="{x(near):.1f}" y1="{y(near):.1f}" x2="{x(far):.1f}" y2="{y(far):.1f}"/>'
    )
    for power in range(low, high + 1):
        tick = 10.0**power
        parts.append(
            f'<line class="f" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{y(near):.1f}" y2="{y(near) + 5:.1f}"/>'
        )
        parts.append(f'<text x="{x(tick):.1f}" y="{y(near) + 18:.1f}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<rect class="f" x="{_LEFT}" y="{_TOP}" width="{side}" height="{side}"/>')
    parts.append(
        f'<text x="{_LEFT + side / 2}" y="{height - 8}" text-anchor="middle">published step time, s</text>'
    )
    parts.append(
        f'<text transform="translate(16 {_TOP + side / 2}) rotate(-90)" text-anchor="middle">'
        "predicted step time, s</text>"
    )
    colours = {
        name: _COLOURS[index % len(_COLOURS)]
        for index, name in enumerate(dict.fromkeys(point.row.source for point in points))
    }
    for point in points:
        colour = colours[point.row.source]
        parts.append(
            f'<circle cx="{x(point.row.step_s):.1f}" cy="{y(point.predicted_s):.1f}" r="3" fill="{colour}" '
            f'stroke="{colour}"><title>{escape(point.row.name)}: published {point.row.step_s:.3g} s, predicted '
            f"{point.predicted_s:.3g} s ({point.error:+.1%})</title></circle>"
        )
    for index, (name, colour) in enumerate(colours.items()):
        top = _TOP + 10 + 18 * index
        parts.append(f'<circle cx="{_SIZE}" cy="{top}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_SIZE + 10}" y="{top + 4}">{escape(name)}</text>')
    foot = _TOP + 10 + 18 * len(colours)
    parts.append(f'<text x="{_SIZE - 4}" y="{foot + 8}">band: ±15%</text>')
    look = {"font_family": "system-ui, sans-serif", "font_size": 11, "xmlns": svg.XMLNS}
    return svg.picture(width, height, *parts, label="predicted against published step time", **look)
