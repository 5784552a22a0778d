"""The loss curve as an SVG file. Pure; the trainer writes it at the end of a run."""

import math
from collections.abc import Sequence

from cumulo.base.chart import Chart, Series, chart_file


def loss_plot(
    title: str, points: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]] = ()
) -> str:
    """Loss by step, raw and smoothed; held-out losses as dots."""
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    series = [Series("loss", finite, color=7), Series("smoothed", _smoothed(finite), color=0)]
    if held_out:
        tips = [f"held out: {loss:.4f}" for _, loss in held_out]
        series.append(Series("held out", held_out, "both", 2, tips))
    return chart_file(Chart(title, "step", "loss", series, y_from_zero=False))


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """An exponential mean that forgets over about a twentieth of the run."""
    share, mean, result = 1 / max(1.0, len(points) / 20), None, []
    for step, loss in points:
        mean = loss if mean is None else mean + share * (loss - mean)
        result.append((step, mean))
    return result
