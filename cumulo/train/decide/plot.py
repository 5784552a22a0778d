"""The loss curve as an SVG file. Pure; the trainer writes it at the end of a run."""

import math
from collections.abc import Sequence
from html import escape

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
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{_STYLE}',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
    ]
    for index in range(5):
        loss = low + (high - low) * index / 4
        step = last * index / 4
        y, x = at(0, loss)[1], at(step, low)[0]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 26}" text-anchor="middle">{step:.0f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    for kind, line in (("raw", finite), ("smooth", _smoothed(finite))):
        if line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
            parts.append(f'<polyline class="{kind}" points="{path}"/>')
    for step, loss in held_out:
        x, y = at(step, loss)
        parts.append(
            f'<circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>held out: {loss:.4f}</title></circle>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """An exponential mean that forgets over about a twentieth of the run."""
    share, mean, result = 1 / max(1.0, len(points) / 20), None, []
    for step, loss in points:
        mean = loss if mean is None else mean + share * (loss - mean)
        result.append((step, mean))
    return result
