"""A request's story as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing."""

from typing import Any

from cumulo.serve.observe.stories import Record

_SERVER, _ENGINE, _TOKENS = 1, 2, 3  # rows of the picture


def chrome_trace(records: list[Record]) -> dict[str, Any]:
    """Trace Event Format: one process per request; spans for phases, marks for events and tokens."""
    events: list[dict[str, Any]] = []
    for process, record in enumerate(records, start=1):
        events += _named(process, record.request_id)
        events += _spans(process, record)
        events += _marks(process, record)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(process: int, name: str) -> list[dict[str, Any]]:
    rows = ((_SERVER, "server"), (_ENGINE, "engine"), (_TOKENS, "tokens"))
    return [
        {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}},
        *(
            {"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": title}}
            for row, title in rows
        ),
    ]


def _spans(process: int, record: Record) -> list[dict[str, Any]]:
    story = record.story
    end_s = record.ended_s
    spans: list[tuple[int, str, float, float | None]] = [
        (_SERVER, "tokenise", record.received_s, record.submitted_s),
        (_SERVER, "answer", record.submitted_s, end_s),
    ]
    if story is not None:
        # An embedding has no first token: all of it is prefill.
        computed_s = story.first_token_s if story.first_token_s is not None else story.finished_s
        spans += [
            (_ENGINE, "queued", story.arrived_s, story.admitted_s),
            (_ENGINE, "prefill", story.admitted_s or 0.0, computed_s if story.admitted_s else None),
            (
                _ENGINE,
                "decode",
                story.first_token_s or 0.0,
                story.finished_s if story.first_token_s else None,
            ),
        ]
        away_s: float | None = None
        for event in story.events:
            if event.kind == "preempted":
                away_s = event.time_s
            elif event.kind == "resumed" and away_s is not None:
                spans.append((_SERVER, "preempted", away_s, event.time_s))
                away_s = None
    return [
        {
            "ph": "X", "cat": "request", "pid": process, "tid": row, "name": name, "ts": start_s * 1e6,
            "dur": max(0.0, stop_s - start_s) * 1e6,
        }
        for row, name, start_s, stop_s in spans
        if stop_s is not None
    ]  # fmt: skip


def _marks(process: int, record: Record) -> list[dict[str, Any]]:
    marks: list[tuple[int, str, float, dict[str, Any]]] = []
    if record.story is not None:
        marks += [(_ENGINE, e.describe(), e.time_s, dict(e.detail)) for e in record.story.events]
    marks += [
        (_TOKENS, f"token {index}", time_s, {}) for index, time_s in enumerate(record.token_times_s, start=1)
    ]
    return [
        {
            "ph": "i", "s": "t", "cat": "event", "pid": process, "tid": row, "name": name, "ts": time_s * 1e6,
            "args": detail,
        }
        for row, name, time_s, detail in marks
    ]  # fmt: skip
