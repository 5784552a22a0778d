"""Charts as SVG text: lines and dots on linear or logarithmic axes. The one writer of charts in files and reports.

`draw` is for a page: colours are CSS classes (`s0`, `s1`, ... for series), so that the page decides between light
and dark. `chart_file` is a file of its own, with title, legend and colours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cumulo.base import svg

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 44
COLORS = ("#2563eb", "#1e3a8a", "#f59e0b", "#92400e", "#059669", "#7c3aed", "#db2777", "#475569")
_STYLE = (
    "<style>svg{background:#fff;font:12px sans-serif}.grid{stroke:#eee}.axis,.tick{stroke:#888}.line{fill:none;"
    "stroke-width:2}.bound{stroke:#dc2626;stroke-dasharray:4 4}.note{fill:#dc2626}"
    + "".join(f".s{at}{{stroke:{color}}}.dot.s{at}{{fill:{color}}}" for at, color in enumerate(COLORS))
    + "</style>"
)
_ENTRY, _PER_LINE = 130, 4  # width of a short name in the legend, and how many stand in a line


@dataclass(frozen=True, slots=True)
class Series:
    """A named set of points. `color` picks the class; `tips` say what the pointer tells at each dot, and `ranges`
    are lines upwards through a point: its x, its low and its high end."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: Literal["line", "dots", "both"] = "line"
    color: int = 0
    tips: Sequence[str] = ()
    ranges: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw. `bounds` are dashed lines across (an objective), `marks` dashed lines upwards."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    bounds: Sequence[tuple[str, float]] = field(default=())
    marks: Sequence[tuple[str, float]] = field(default=())
    y_from_zero: bool = True


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels."""

    low: float
    high: float
    from_pixel: float
    to_pixel: float
    log: bool
    step: float = 1.0  # between ticks, where linear

    def pixel(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.from_pixel + (value - low) / (high - low) * (self.to_pixel - self.from_pixel)


def axis(values: Sequence[float], from_pixel: float, to_pixel: float, log: bool, from_zero: bool) -> Scale:
    """An axis with room for all values, ending on round numbers."""
    finite = [value for value in values if math.isfinite(value) and (not log or value > 0)]
    if not finite:
        finite = [1.0] if log else [0.0, 1.0]
    low, high = min(finite), max(finite)
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
        if low == high:
            high *= 10
        return Scale(low, high, from_pixel, to_pixel, True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        high = low + (abs(low) or 1.0)
    step = _step(high - low)
    return Scale(
        math.floor(low / step) * step, math.ceil(high / step) * step, from_pixel, to_pixel, False, step
    )


def ticks(scale: Scale) -> list[float]:
    """Round values along the axis, about five."""
    if scale.log:
        first, last = round(math.log10(scale.low)), round(math.log10(scale.high))
        stride = max(1, math.ceil((last - first) / 6))
        decades = [10.0**power for power in range(first, last + 1, stride)]
        if last - first <= 2:
            decades = [m * 10.0**power for power in range(first, last) for m in (1, 2, 5)] + [10.0**last]
        return decades
    count = round((scale.high - scale.low) / scale.step)
    return [scale.low + scale.step * number for number in range(count + 1)]


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that four to ten steps cover the span."""
    magnitude: float = 10.0 ** math.floor(math.log10(span / 4))
    return next(m * magnitude for m in (1, 2, 5, 10) if span / (m * magnitude) <= 6)


def number(value: float) -> str:
    """A tick's label."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.3g}k" if abs(value) < 1e6 else f"{value / 1e6:,.3g}M"
    return f"{value:.4g}"


def draw(chart: Chart) -> str:
    """The chart as an <svg> element, for a page that has its title, its legend and the colours."""
    return svg.picture(WIDTH, HEIGHT, *_parts(chart), label=chart.title)


def chart_file(chart: Chart) -> str:
    """The chart as the text of an SVG file. Long names get a line of the legend each."""
    per_line = _PER_LINE if all(len(one.name) < 18 for one in chart.series) else 1
    legend = [
        svg.text(
            LEFT + _ENTRY * (at % per_line),
            HEIGHT + 14 + 16 * (at // per_line),
            one.name,
            fill=COLORS[one.color],
        )
        for at, one in enumerate(chart.series)
    ]
    heading = svg.text(LEFT, -6, chart.title, font_weight="bold")
    box = f"0 -22 {WIDTH} {HEIGHT + 30 + 16 * -(-len(legend) // per_line)}"
    inside = (_STYLE, heading, *legend, *_parts(chart))
    look = {"xmlns": svg.XMLNS, "width": 2 * WIDTH, "viewBox": box, "role": "img", "aria_label": chart.title}
    return svg.tag("svg", *inside, **look) + "\n"


def _parts(chart: Chart) -> list[str]:
    xs = [x for series in chart.series for x, _ in series.points] + [x for _, x in chart.marks]
    ys = [y for series in chart.series for _, y in series.points] + [y for _, y in chart.bounds]
    ys += [end for series in chart.series for _, *ends in series.ranges for end in ends]
    x_axis = axis(xs, LEFT, WIDTH - RIGHT, chart.x_log, from_zero=not chart.x_log)
    y_axis = axis(ys, HEIGHT - BOTTOM, TOP, chart.y_log, from_zero=chart.y_from_zero)
    parts = _frame(chart, x_axis, y_axis)
    for series in chart.series:
        parts += _series(series, x_axis, y_axis)
    for name, value in chart.bounds:
        y = y_axis.pixel(value)
        parts += [
            svg.line(LEFT, y, WIDTH - RIGHT, y, "bound"),
            svg.text(LEFT + 6, y - 4, name, class_="note"),
        ]
    for name, value in chart.marks:
        x = x_axis.pixel(value)
        anchor, shift = ("end", -5) if x > WIDTH * 0.7 else ("start", 5)
        parts += [
            svg.line(x, TOP, x, HEIGHT - BOTTOM, "bound"),
            svg.text(x + shift, TOP + 12, name, anchor, class_="note"),
        ]
    return parts


def _frame(chart: Chart, x_axis: Scale, y_axis: Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in ticks(y_axis):
        y = y_axis.pixel(value)
        parts += [svg.line(LEFT, y, right, y, "grid"), svg.text(LEFT - 7, y + 4, number(value), "end")]
    for value in ticks(x_axis):
        x = x_axis.pixel(value)
        parts += [
            svg.line(x, bottom, x, bottom + 4, "tick"),
            svg.text(x, bottom + 17, number(value), "middle"),
        ]
    return [
        *parts,
        svg.line(LEFT, bottom, right, bottom, "axis"),
        svg.text((LEFT + right) / 2, HEIGHT - 8, chart.x_label, "middle"),
        svg.upright(14, (TOP + bottom) / 2, chart.y_label),
    ]


def _series(series: Series, x_axis: Scale, y_axis: Scale) -> list[str]:
    shown = [
        (x, y)
        for x, y in series.points
        if math.isfinite(y) and (not y_axis.log or y > 0) and (not x_axis.log or x > 0)
    ]
    parts = []
    if series.kind != "dots" and shown:
        path = [(x_axis.pixel(x), y_axis.pixel(y)) for x, y in shown]
        parts.append(svg.polyline(path, f"line s{series.color}"))
    for x, low, high in series.ranges:
        ends = y_axis.pixel(low), y_axis.pixel(high)
        parts.append(svg.line(x_axis.pixel(x), ends[0], x_axis.pixel(x), ends[1], f"s{series.color}"))
    if series.kind != "line":
        radius = 3.5 if series.kind == "both" else 2.2
        for place, (x, y) in enumerate(shown):
            tip = series.tips[place] if series.tips else f"{series.name}: {number(y)} at {number(x)}"
            at = x_axis.pixel(x), y_axis.pixel(y)
            parts.append(svg.dot(*at, radius, tip, class_=f"dot s{series.color}"))
    return parts
