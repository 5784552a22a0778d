"""A request's story as phases, for OpenTelemetry, and as a Chrome trace for https://ui.perfetto.dev or
chrome://tracing.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cumulo.engine.decide.story import Event, Story
from cumulo.serve.observe.stories import Record

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Mark:
    name: str
    time_s: float
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Value] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    inner: list["Phase"] = field(default_factory=list)


def phases(story: Story) -> list[Phase]:
    """A story cut into spans of time: queued, prefill, decode, and preempted within them. One after the other,
    without gaps, from arrival at the engine to the end; those not reached are left out."""
    end_s = story.finished_s
    if end_s is None:
        end_s = story.events[-1].time_s if story.events else story.arrived_s
    begins = [("queued", story.arrived_s), ("prefill", story.admitted_s), ("decode", story.first_token_s)]
    reached = [(name, start_s) for name, start_s in begins if start_s is not None]
    ends_s = [start_s for _, start_s in reached[1:]] + [end_s]
    found = [
        Phase(name, start_s, max(start_s, stop_s))
        for (name, start_s), stop_s in zip(reached, ends_s, strict=True)
    ]
    for event in story.events:
        if event.kind != "preempted" and event.kind != "resumed":
            _at(found, event.time_s).marks.append(Mark(event.kind, event.time_s, _attributes(event)))
    for away in _preemptions(story, end_s):
        _at(found, away.start_s).inner.append(away)
    return found


def _at(found: list[Phase], time_s: float) -> Phase:
    """The phase a moment belongs to: the last that had begun."""
    return next((phase for phase in reversed(found) if phase.start_s <= time_s), found[0])


def _preemptions(story: Story, end_s: float) -> list[Phase]:
    """From giving way to coming back. Of several samples away, the first to go is taken as the first back."""
    away: deque[Event] = deque()
    found: list[Phase] = []
    for event in story.events:
        if event.kind == "preempted":
            away.append(event)
        elif event.kind == "resumed" and away:
            left = away.popleft()
            attributes = _attributes(left) | _attributes(event)
            found.append(Phase("preempted", left.time_s, event.time_s, attributes))
    found += [Phase("preempted", left.time_s, max(left.time_s, end_s), _attributes(left)) for left in away]
    return found


def _attributes(event: Event) -> dict[str, Value]:
    """The decision's numbers. An error's words stay out: they may quote what the caller sent."""
    return {
        f"cumulo.{event.kind}.{name}": value
        for name, value in event.detail.items()
        if name != "error" and isinstance(value, Value)
    }


_SERVER, _ENGINE, _TOKENS = 1, 2, 3  # rows of the picture


def chrome_trace(records: list[Record]) -> dict[str, Any]:
    """Trace Event Format: one process per request; spans for phases, marks for events and tokens."""
    events = [
        {**event, "pid": process}
        for process, record in enumerate(records, start=1)
        for event in (*_names(record.request_id), *_spans(record), *_marks(record))
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(name: str) -> list[dict[str, Any]]:
    rows = ((_SERVER, "server"), (_ENGINE, "engine"), (_TOKENS, "tokens"))
    return [
        {"ph": "M", "tid": 0, "name": "process_name", "args": {"name": name}},
        *({"ph": "M", "tid": row, "name": "thread_name", "args": {"name": title}} for row, title in rows),
    ]


def _spans(record: Record) -> list[dict[str, Any]]:
    spans = [(_SERVER, Phase("tokenise", record.received_s, record.submitted_s))]
    if record.ended_s is not None:
        spans.append((_SERVER, Phase("answer", record.submitted_s, record.ended_s)))
    for phase in phases(record.story) if record.story is not None else ():
        spans += [(_ENGINE, phase), *((_SERVER, inner) for inner in phase.inner)]
    return [
        {
            "ph": "X", "cat": "request", "tid": row, "name": phase.name, "ts": phase.start_s * 1e6,
            "dur": max(0.0, phase.end_s - phase.start_s) * 1e6,
        }
        for row, phase in spans
    ]  # fmt: skip


def _marks(record: Record) -> list[dict[str, Any]]:
    told = record.story.events if record.story is not None else []
    marks = [(_ENGINE, event.describe(), event.time_s, dict(event.detail)) for event in told]
    marks += [(_TOKENS, f"token {index}", time_s, {}) for index, time_s in enumerate(record.token_times_s, 1)]
    return [
        {"ph": "i", "s": "t", "cat": "event", "tid": row, "name": name, "ts": time_s * 1e6, "args": detail}
        for row, name, time_s, detail in marks
    ]
