"""The table of the requests page as HTML: requests and rejected calls, newest first, and the filters."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from html import escape

from cumulo.console.words import clock_time, milliseconds, short_id
from cumulo.serve.observe.stories import Record, Rejection

STATUSES = ("all", "queued", "running", "stop", "length", "abort", "error", "rejected")
_UNKNOWN_CALLER = "unknown"


@dataclass(frozen=True, slots=True)
class Filter:
    status: str = "all"
    caller: str = ""  # empty: all
    since_s: float = 0.0  # monotonic clock
    words: str = ""  # part of an id, a caller or a reason


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One line of the table; a rejected call has no id and no story."""

    received_s: float
    status: str
    caller: str
    record: Record | None = None
    rejection: Rejection | None = None

    def is_let_through(self, chosen: Filter) -> bool:
        if chosen.status not in ("all", self.status) or chosen.caller not in ("", self.caller):
            return False
        searched = f"{self.caller} {self.record.request_id if self.record else ''} {self.reason}".lower()
        return self.received_s >= chosen.since_s and chosen.words.strip().lower() in searched

    @property
    def reason(self) -> str:
        if self.rejection is not None:
            return f"{self.rejection.status}: {self.rejection.reason}"
        return (self.record.error or "") if self.record is not None else ""


def rows_of(
    records: Iterable[Record], rejections: Iterable[Rejection], queued_ids: Collection[str]
) -> list[RequestRow]:
    """Newest first."""
    rows = [
        RequestRow(record.received_s, status_of(record, queued_ids), record.caller, record=record)
        for record in records
    ]
    rows += [
        RequestRow(one.received_s, "rejected", one.caller or _UNKNOWN_CALLER, rejection=one)
        for one in rejections
    ]
    return sorted(rows, key=lambda row: row.received_s, reverse=True)


def status_of(record: Record, queued_ids: Collection[str] = ()) -> str:
    if record.outcome is not None:
        return record.outcome
    return "queued" if record.request_id in queued_ids else "running"


_COLUMNS = (  # name, classes, tooltip
    ("", "pick", "Choose two requests to compare them."),
    ("received", "", "When the server received the request."),
    ("request", "", "The beginning of its id; cumulo explain takes it."),
    ("status", "", "queued, running, how it ended, or rejected before it reached the engine."),
    ("prompt", "right wide-only", "Prompt tokens."),
    ("output", "right", "Output tokens."),
    ("cached", "right wide-only", "Prompt tokens that came from the prefix cache."),
    ("queue time", "right wide-only", "Time until the request got a place in the engine."),
    ("TTFT", "right wide-only", "Time to first token, from when the server received the request."),
    ("total", "right", "Time from when the server received the request until it ended."),
    ("key", "wide-only", "The name of the API key that sent it; anyone: no key was needed."),
)


def table_html(rows: list[RequestRow], picked: Collection[str]) -> str:
    head = "".join(
        f'<th class="{classes}" title="{escape(explained)}">{name}</th>'
        for name, classes, explained in _COLUMNS
    )
    body = "".join(_rejected(row) if row.rejection else _request(row, picked) for row in rows)
    return f'<table class="plain requests"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _request(row: RequestRow, picked: Collection[str]) -> str:
    record = row.record
    assert record is not None
    story, name, short = record.story, escape(record.request_id), escape(short_id(record.request_id, 10))
    total_s = None if record.ended_s is None else record.ended_s - record.received_s
    output = story.output_tokens if story else len(record.token_times_s)
    checked = " checked" if record.request_id in picked else ""
    return (
        f'<tr><td class="pick"><input type="checkbox" aria-label="Compare {name}" data-id="{name}"{checked} '
        "onchange=\"emitEvent('pick', this.dataset.id)\"></td>"
        f'<td class="num">{clock_time(record.received_s)}</td>'
        f'<td><a class="mono" href="/requests/{name}" title="{name}">{short}</a></td>'
        f"<td>{badge(record, row.status)}</td>"
        f'<td class="right num wide-only">{record.prompt_tokens:,}</td><td class="right num">{output:,}</td>'
        f'<td class="right num wide-only">{f"{story.cached_tokens:,}" if story else "–"}</td>'
        f'<td class="right num wide-only">{milliseconds(story.queue_s if story else None)}</td>'
        f'<td class="right num wide-only">{milliseconds(record.ttft_s)}</td>'
        f'<td class="right num">{milliseconds(total_s)}</td>'
        f'<td class="wide-only">{escape(record.caller)}</td></tr>'
    )


def _rejected(row: RequestRow) -> str:
    one = row.rejection
    assert one is not None
    return (
        f'<tr class="rejected"><td></td><td class="num">{clock_time(one.received_s)}</td>'
        f'<td class="mono soft wide-only">{escape(one.path)}</td>'
        f'<td colspan="7"><span class="badge error">rejected {one.status}</span> '
        f'<span class="reason">{escape(one.reason)}</span></td>'
        f'<td class="wide-only">{escape(row.caller)}</td></tr>'
    )


MEANINGS = {
    "all": "All requests.",
    "queued": "Waits for a place in the engine.",
    "running": "The engine computes it now.",
    "stop": "The model ended its answer, or wrote a stop string.",
    "length": "Stopped at max_tokens.",
    "abort": "The client stopped it or closed the connection.",
    "error": "It failed; its page tells the reason.",
    "rejected": "The server refused it before it reached the engine.",
}


def badge(record: Record, status: str = "") -> str:
    state = status or status_of(record)
    meaning = escape(MEANINGS.get(state, ""))
    return f'<span class="badge {escape(state)}" title="{meaning}">{escape(state)}</span>'
