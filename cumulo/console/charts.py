"""Charts of the live page as SVG text: columns and lines over time with labelled axes. Colours are in style.css."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cumulo.base import svg

_WIDTH, _HEIGHT = 480, 132
_LEFT, _RIGHT, _TOP, _FOOT = 44, 4, 8, 18  # around the drawing, for the labels


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """`floor`: the scale never ends below this, so that small values look small. `ends`: the labels below the left
    and the right end."""

    unit: str
    floor: float
    ends: tuple[str, str]
    most: float | None = None  # a fixed end instead of one that fits the values
    counts: bool = False  # whole numbers: half of the scale is one, too


def nice_most(value: float, floor: float, steps: tuple[int, ...] = (1, 2, 5, 10)) -> float:
    """The end of a scale: 1, 2 or 5 times a power of ten, at least the floor and the value."""
    wanted = max(value, floor)
    if wanted <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(step * power for step in steps if step * power >= wanted * (1 - 1e-9))


def column_chart(values: Sequence[float], axis: ChartAxis, ink: str, titles: Sequence[str] = ()) -> str:
    """One column per value, oldest left. `titles`: what the pointer tells at each."""
    most = _most(values, axis)
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values))
    columns = []
    for index, value in enumerate(values):
        if value <= 0 and not titles:
            continue
        height = max(1.0, _span() * min(1.0, value / most)) if value > 0 else 0.0
        columns.append(
            svg.tag(
                "rect", *([svg.title(titles[index])] if titles else []), class_=f"ink-{ink}",
                x=_LEFT + index * width, y=_bottom() - height,
                width=max(0.5, width - (1 if width > 3 else 0)), height=height,
            )
        )  # fmt: skip
    if not any(value > 0 for value in values):
        columns = [svg.text((_LEFT + _WIDTH) / 2, _bottom() - _span() / 4, "nothing in this time", "middle")]
    return _frame(axis, most, "".join(columns))


def line_chart(lines: Sequence[tuple[str, str, Sequence[float | None]]], axis: ChartAxis) -> str:
    """Lines of one scale, each with its name, its ink and its values; None leaves a gap."""
    values = [value for _, _, points in lines for value in points if value is not None]
    most = _most(values, axis)
    paths = []
    for _, ink, points in lines:
        step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(points) - 1)
        path, pen = "", "M"
        for index, value in enumerate(points):
            if value is None:
                pen = "M"
                continue
            path += f"{pen}{_LEFT + index * step:.1f} {_bottom() - _span() * min(1.0, value / most):.1f}"
            pen = "L"
        paths.append(svg.tag("path", class_=f"line-{ink}", d=path))
    legend = "".join(f'<span><i class="ink-{ink}"></i>{escape(name)}</span>' for name, ink, _ in lines)
    return _frame(axis, most, "".join(paths)) + f'<div class="legend">{legend}</div>'


def _most(values: Sequence[float], axis: ChartAxis) -> float:
    steps = (2, 4, 10) if axis.counts else (1, 2, 5, 10)
    return axis.most or nice_most(max(values, default=0.0), axis.floor, steps)


def _bottom() -> float:
    return _HEIGHT - _FOOT


def _span() -> float:
    return _HEIGHT - _FOOT - _TOP


def _frame(axis: ChartAxis, most: float, drawn: str) -> str:
    """The drawing on lines at nothing, half and all of the scale."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _bottom() - _span() * share
        parts.append(svg.tag("path", class_="grid", d=f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"))
        parts.append(svg.text(_LEFT - 6, y + 3.5, _label(most * share), "end"))
    left, right = axis.ends
    ends = svg.text(_LEFT, _HEIGHT - 4, left), svg.text(_WIDTH - _RIGHT, _HEIGHT - 4, right, "end")
    return svg.picture(_WIDTH, _HEIGHT, *parts, drawn, *ends, label=axis.unit, class_="chart axes")


def _label(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"
