"""A schedule as a picture: time goes down, each rank has a column, each message a line in its chunk's colour."""

from cumulo.base import svg
from cumulo.collectives.decide.check import placed_messages
from cumulo.collectives.decide.schedule import CollectiveSchedule, Move

_COLUMN, _ROW, _LEFT, _TOP = 64.0, 44.0, 60.0, 58.0
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.name{font-weight:600}.rank{stroke:#ccc;stroke-width:1}"
    ".reduce{stroke-width:2.2;fill:none}.copy{stroke-width:2.2;stroke-dasharray:5 3;fill:none}"
    ".step{fill:#888;font-size:11px}.size{fill:#666;font-size:10px}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.rank{stroke:#555}.step,.size{fill:#999}}"
)


def collective_svg(schedule: CollectiveSchedule) -> str:
    """Solid: what arrives is added. Dashed: what arrives is copied."""
    messages = placed_messages(schedule)
    steps = max((one.step + 1 for one in messages), default=0)
    width, height = _LEFT + _COLUMN * schedule.nodes, _TOP + _ROW * max(1, steps) + 28
    chunks = max(1, len(schedule.sizes))
    parts = [
        svg.tag("style", _STYLE),
        svg.text(8, 18, f"{schedule.name}: {schedule.ranks} ranks, {steps} steps", class_="name"),
    ]
    for node in range(schedule.nodes):
        x = _LEFT + _COLUMN * (node + 0.5)
        label = str(node) if node < schedule.ranks else f"switch {node - schedule.ranks}"
        parts.append(svg.text(x, _TOP - 14, label, anchor="middle"))
        parts.append(svg.line(x, _TOP, x, _TOP + _ROW * max(1, steps), "rank"))
    for step in range(steps):
        parts.append(svg.text(8, _TOP + _ROW * (step + 0.6), f"step {step + 1}", class_="step"))
    for one in messages:
        hue = round(360 * (one.transfer.chunk / chunks)) % 360
        class_ = "copy" if one.transfer.move is Move.COPY else "reduce"
        x1, x2 = (_LEFT + _COLUMN * (rank + 0.5) for rank in (one.sender, one.receiver))
        y1, y2 = _TOP + _ROW * one.step + 4, _TOP + _ROW * (one.step + 1) - 4
        tip = f"step {one.step + 1}: {one.sender} to {one.receiver}, {one.transfer}"
        colour = f"hsl({hue} 65% 48%)"
        parts.append(
            svg.tag(
                "line", svg.title(tip), class_=class_, x1=x1, y1=y1, x2=x2, y2=y2, style=f"stroke:{colour}"
            )
        )
        parts.append(svg.dot(x2, y2, 3, tip, style=f"fill:{colour}"))
    foot = "solid: added · dashed: copied · one colour for each chunk"
    parts.append(svg.text(8, height - 8, foot, class_="size"))
    return svg.picture(width, height, *parts, label=f"Schedule of a {schedule.name}", xmlns=svg.XMLNS)
