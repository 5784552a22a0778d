"""A timeline as text for a terminal: one line per stage, one cell per action. `cumulo schedule` colours it."""

from dataclasses import dataclass

from cumulo.pipeline.decide.actions import Kind
from cumulo.pipeline.draw.svg import is_second
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
