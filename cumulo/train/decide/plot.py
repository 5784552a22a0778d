"""The loss curve as an SVG file. Pure; the trainer writes it at the end of a run."""

import math
from collections.abc import Sequence

from cumulo.base import svg

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 44, 48
_STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#444}.title{font-size:15px;fill:#111}"
    ".grid{stroke:#ddd}.raw{fill:none;stroke:#9db8e8}.smooth{fill:none;stroke:#1d4ed8;stroke-width:2}"
    ".held{fill:#c2410c}</style>"
)


def loss_plot(
    title: str, points: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]] = ()
) -> str:
    """Loss by step, raw and smoothed; held-out losses as dots."""
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    values = [loss for _, loss in (*finite, *held_out)] or [0.0, 1.0]
    low, high = min(values), max(values)
    low, high = (low - 0.5, high + 0.5) if high == low else (low, high)
    last = max((step for step, _ in (*finite, *held_out)), default=1) or 1

    def at(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + step / last * (WIDTH - LEFT - RIGHT)
        return x, TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        _STYLE,
        svg.tag("rect", width=WIDTH, height=HEIGHT, fill="white"),
        svg.text(LEFT, 24, title, class_="title"),
    ]
    for index in range(5):
        loss = low + (high - low) * index / 4
        step = last * index / 4
        y, x = at(0, loss)[1], at(step, low)[0]
        parts += [
            svg.line(LEFT, y, WIDTH - RIGHT, y, "grid"),
            svg.text(LEFT - 8, y + 4, f"{loss:.2f}", "end"),
            svg.text(x, HEIGHT - 26, f"{step:.0f}", "middle"),
        ]
    parts.append(svg.text(WIDTH / 2, HEIGHT - 8, "step", "middle"))
    for kind, line in (("raw", finite), ("smooth", _smoothed(finite))):
        if line:
            parts.append(svg.polyline((at(*point) for point in line), kind))
    parts += [svg.dot(*at(step, loss), 4, f"held out: {loss:.4f}", class_="held") for step, loss in held_out]
    return svg.picture(WIDTH, HEIGHT, "\n".join(parts), label=title, xmlns=svg.XMLNS) + "\n"


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """An exponential mean that forgets over about a twentieth of the run."""
    share, mean, result = 1 / max(1.0, len(points) / 20), None, []
    for step, loss in points:
        mean = loss if mean is None else mean + share * (loss - mean)
        result.append((step, mean))
    return result
