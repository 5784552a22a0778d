"""The table of the requests page as HTML: one row per request, and which rows a filter lets through."""

from collections.abc import Iterable
from html import escape

from cumulo.console.words import clock_time, milliseconds, short_id
from cumulo.serve.stories import Record


def matching(records: Iterable[Record], outcome: str, words: str) -> Iterable[Record]:
    """Those that ended this way (or all, or run) and have the words in their id or caller."""
    wanted = words.strip().lower()
    for record in records:
        if outcome in ("all", record.outcome or "running") and (
            wanted in record.request_id.lower() or wanted in record.caller.lower()
        ):
            yield record


_COLUMNS = (  # name, classes
    ("received", ""), ("request", ""), ("ended", ""), ("prompt", "right wide-only"), ("output", "right"),
    ("from cache", "right wide-only"), ("queued", "right wide-only"), ("first token", "right wide-only"),
    ("total", "right"), ("caller", "wide-only"),
)  # fmt: skip


def _table(records: list[Record]) -> str:
    head = "".join(f'<th class="{classes}">{name}</th>' for name, classes in _COLUMNS)
    rows = "".join(map(_row, records))
    return f'<table class="plain requests"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _row(record: Record) -> str:
    story = record.story
    total_s = None if record.ended_s is None else record.ended_s - record.received_s
    output = story.output_tokens if story else len(record.token_times_s)
    return (
        f'<tr><td class="num">{clock_time(record.received_s)}</td>'
        f'<td><a class="mono" href="/requests/{escape(record.request_id)}" title="{escape(record.request_id)}">'
        f"{escape(short_id(record.request_id, 10))}</a></td><td>{badge(record)}</td>"
        f'<td class="right num wide-only">{record.prompt_tokens:,}</td><td class="right num">{output:,}</td>'
        f'<td class="right num wide-only">{f"{story.cached_tokens:,}" if story else "–"}</td>'
        f'<td class="right num wide-only">{milliseconds(story.queue_s if story else None)}</td>'
        f'<td class="right num wide-only">{milliseconds(story.ttft_s if story else None)}</td>'
        f'<td class="right num">{milliseconds(total_s)}</td>'
        f'<td class="wide-only">{escape(record.caller)}</td></tr>'
    )


def badge(record: Record) -> str:
    state = record.outcome or "running"
    return f'<span class="badge {escape(state)}">{escape(state)}</span>'
