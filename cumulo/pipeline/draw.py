"""Pictures of a timeline: an SVG file and a Chrome/Perfetto trace. The command and the documentation use them."""

import json
from dataclasses import dataclass

from cumulo.base import svg
from cumulo.pipeline.decide.actions import Action, Kind
from cumulo.pipeline.simulate.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Cell:
    """A stretch of one stage's line; no kind: the stage idles."""

    text: str
    kind: Kind | None = None
    second: bool = False  # a later chunk of the stage, or the reverse direction


def columns_to_read(timeline: Timeline) -> int:
    """How wide the picture must be for every action to show its micro-batch."""
    shortest = min(
        (
            span.end_s - span.start_s
            for row in timeline.compute_spans
            for span in row
            if span.end_s > span.start_s
        ),
        default=1.0,
    )
    digits = len(str(timeline.schedule.micro_batches - 1))
    return round(timeline.makespan_s / shortest * (1 + digits))


def text_rows(timeline: Timeline, columns: int) -> list[list[Cell]]:
    """Every stage's cells, `columns` characters in all: `F3··` is the forward of micro-batch 3.

    Overlapped actions share their time; so do their cells, first half and second half.
    """
    scale = columns / (timeline.makespan_s or 1.0)
    rows = []
    for spans in timeline.compute_spans:
        row: list[Cell] = []
        used = 0
        for start_s, end_s, span in _apart(spans):
            start, end = round(start_s * scale), round(end_s * scale)
            if end <= max(start, used):
                continue  # narrower than a character
            if start > used:
                row.append(Cell(" " * (start - used)))
            length = end - max(start, used)
            label = f"{span.action.kind.value}{span.action.micro_batch}"
            text = label if len(label) <= length else span.action.kind.value[:length]
            row.append(Cell(text.ljust(length, "·"), span.action.kind, is_second(timeline, span.action)))
            used = end
        if used < columns:
            row.append(Cell(" " * (columns - used)))
        rows.append(row)
    return rows


def _apart(spans: tuple[Span, ...]) -> list[tuple[float, float, Span]]:
    """Spans with times of their own: an overlapped pair is shown one after the other."""
    apart = []
    second = False
    for span in spans:
        middle = (span.start_s + span.end_s) / 2
        apart.append(
            (middle if second else span.start_s, middle if span.action.overlaps_next else span.end_s, span)
        )
        second = span.action.overlaps_next
    return apart


# Colour by kind: (first lap or direction, the others). Dark text is readable on all of them.
COLOURS: dict[Kind, tuple[str, str]] = {
    Kind.FORWARD: ("#7fb2e5", "#bcd8f4"),
    Kind.BACKWARD: ("#6cc08b", "#b2e0c3"),
    Kind.BACKWARD_INPUT: ("#f0b35f", "#f8dbb0"),
    Kind.BACKWARD_WEIGHT: ("#c58fd6", "#e4caec"),
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
_ROW, _GAP, _LEFT, _TOP, _LEGEND = 24, 5, 62, 34, 30  # pixels


def is_second(timeline: Timeline, action: Action) -> bool:
    """Whether an action gets its kind's lighter colour: a later lap over the stages, or the reverse direction."""
    return action.direction == 1 or action.chunk // timeline.schedule.stages % 2 == 1


def to_svg(timeline: Timeline, title: str, width: int = 1200) -> str:
    """One row per stage, one box per action with its micro-batch; overlapped actions share a row's height."""
    schedule = timeline.schedule
    scale = (width - _LEFT - 10) / (timeline.makespan_s or 1.0)
    height = _TOP + schedule.stages * (_ROW + _GAP) + _LEGEND
    parts = [
        svg.title(title),
        svg.tag("rect", width=width, height=height, fill="#ffffff"),
        svg.text(10, 21, title, font_size=14, font_weight=600),
        svg.text(width - 10, 21, f"{timeline.bubble_ratio:.1%} idle", "end", fill="#52606d"),
    ]
    for stage, spans in enumerate(timeline.compute_spans):
        top = _TOP + stage * (_ROW + _GAP)
        length = timeline.makespan_s * scale
        parts.append(svg.text(10, top + 16, f"stage {stage}"))
        parts.append(svg.tag("rect", x=_LEFT, y=top, width=length, height=_ROW, fill="#eceff2"))
        overlapped = False  # the action before shares this one's time
        for span in spans:
            together = overlapped or span.action.overlaps_next
            half = _ROW / 2 if together else _ROW
            y = top + (half if overlapped else 0)
            parts.append(_box(timeline, span, _LEFT + span.start_s * scale, y, scale, half))
            overlapped = span.action.overlaps_next
    parts.append(_legend(timeline, height - 10))
    return svg.picture(
        width, height, "\n".join(parts), xmlns=svg.XMLNS, width_=width, height_=height,
        font_family="system-ui, sans-serif", font_size=11, fill="#1f2933",
    ) + "\n"  # fmt: skip


def _box(timeline: Timeline, span: Span, x: float, y: float, scale: float, height: float) -> str:
    action = span.action
    colour = COLOURS[action.kind][is_second(timeline, action)]
    box_width = (span.end_s - span.start_s) * scale
    label = str(action.micro_batch)
    size = min(11.0, height - 2, 1.6 * box_width / len(label))
    text = ""
    if size >= 5:  # smaller cannot be read; the tooltip still has it
        middle = y + height / 2 + size * 0.36
        text = svg.text(x + box_width / 2, middle, label, "middle", font_size=size)
    tip = svg.title(f"{action}, {span.start_s:g} to {span.end_s:g} s")
    box = svg.tag(
        "rect", x=x, y=y, width=box_width, height=height, fill=colour, stroke="#ffffff", stroke_width=0.6
    )
    return svg.tag("g", tip, box, text)


def _legend(timeline: Timeline, y: int) -> str:
    actions = {
        (span.action.kind, is_second(timeline, span.action)) for row in timeline.compute_spans for span in row
    }
    second_means = "reverse" if timeline.schedule.directions == 2 else "other chunk"
    x, parts = float(_LEFT), []
    for kind in COLOURS:
        for second in (False, True):
            if (kind, second) not in actions:
                continue
            name = NAMES[kind] + (f", {second_means}" if second else "")
            parts.append(svg.tag("rect", x=x, y=y - 10, width=12, height=12, fill=COLOURS[kind][second]))
            parts.append(svg.text(x + 16, y, name))
            x += 28 + 5.9 * len(name)
    return "\n".join(parts)


def to_perfetto(timeline: Timeline) -> str:
    """The Chrome trace-event format: one track for each stage's compute, one for its sends and receives."""
    events: list[dict[str, object]] = []
    for stage, spans in enumerate(timeline.spans):
        for track, name in enumerate((f"stage {stage}", f"stage {stage} messages")):
            thread = {"pid": 0, "tid": 2 * stage + track}
            events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": name}})
            events.append(
                {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": 2 * stage + track}}
            )
        for span in spans:
            action = span.action
            events.append(
                {
                    "ph": "X",
                    "name": f"{action.kind}{action.micro_batch}" if action.kind.is_compute else str(action),
                    "cat": action.kind.name.lower(),
                    "pid": 0,
                    "tid": 2 * stage + (not action.kind.is_compute),
                    "ts": span.start_s * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {
                        "micro_batch": action.micro_batch,
                        "chunk": action.chunk,
                        "direction": action.direction,
                    },
                }
            )
    events.append(
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"pipeline {timeline.schedule.name}"}}
    )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
