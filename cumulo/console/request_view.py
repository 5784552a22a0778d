"""The table of the requests page as HTML: requests and rejected calls, newest first, and the filters."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from cumulo.console.values import clock_time, figure, milliseconds, short_id, table, tile
from cumulo.serve.observe.stories import Record, Rejection, explanation

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
    return table(
        _COLUMNS, (_rejected(row) if row.rejection else _request(row, picked) for row in rows), "requests"
    )


def _request(row: RequestRow, picked: Collection[str]) -> list[str]:
    record = row.record
    assert record is not None
    story, name, short = record.story, escape(record.request_id), escape(short_id(record.request_id, 10))
    checked = " checked" if record.request_id in picked else ""
    return [
        f'<input type="checkbox" aria-label="Compare {name}" data-id="{name}"{checked} '
        "onchange=\"emitEvent('pick', this.dataset.id)\">",
        f'<span class="num">{clock_time(record.received_s)}</span>',
        f'<a class="mono" href="/requests/{name}" title="{name}">{short}</a>',
        badge(record, row.status),
        f"{record.prompt_tokens:,}",
        f"{story.output_tokens if story else len(record.token_times_s):,}",
        f"{story.cached_tokens:,}" if story else "–",
        milliseconds(story.queue_s if story else None),
        milliseconds(record.ttft_s),
        milliseconds(None if record.ended_s is None else record.ended_s - record.received_s),
        escape(record.caller),
    ]


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


_WIDTH, _BAR_Y, _BAR_HEIGHT = 900, 8, 22
_MOST_TICKS = 400


def story_html(record: Record, badge: str) -> str:
    told = explanation(record)
    error = f'<p class="words" style="color: var(--bad)">{escape(record.error)}</p>' if record.error else ""
    return (
        f'<div class="story"><div class="card"><h2 class="mono">{escape(record.request_id)} {badge}</h2>'
        f'<p class="words">{escape(told["summary"])}</p>{error}{_line(record)}'
        f'<p class="soft small" style="margin: 8px 0 0">received at {clock_time(record.received_s)} from '
        f"{escape(record.caller)}, {'streamed' if record.stream else 'not streamed'}"
        f"{f', {record.samples} samples' if record.samples > 1 else ''}</p></div>"
        f"{_tiles(told)}{_events(told)}</div>"
    )


_NUMBERS = (  # term, where in an explanation, unit, tooltip
    ("Prompt", ("tokens", "prompt"), "tokens", "Tokens of the prompt."),
    ("Cached", ("tokens", "cached"), "tokens", "Prompt tokens that came from the prefix cache."),
    ("Output", ("tokens", "output"), "tokens", "Tokens of the answer."),
    ("Recomputed", ("tokens", "recomputed"), "tokens", "Tokens computed again after a preemption."),
    ("Drafted", ("tokens", "drafted"), "tokens", "Tokens drafted by speculation (--speculate)."),
    ("Accepted", ("tokens", "accepted"), "tokens", "Drafted tokens that were accepted."),
    ("Preemptions", ("preemptions",), "", "Times the request gave up its KV blocks to others."),
    ("Queue time", ("times_ms", "queued"), "ms", "From its arrival in the engine until it got a place."),
    ("TTFT", ("times_ms", "first_token"), "ms", "Time to first token, from when the server received it."),
    ("ITL p50", ("times_ms", "gap_median"), "ms", "Inter-token latency: median gap between two tokens."),
    ("ITL max", ("times_ms", "gap_max"), "ms", "The longest gap between two tokens."),
    ("Total time", ("times_ms", "total"), "ms", "From when the server received it until it was complete."),
)


_OF_DRAFTS = (("tokens", "drafted"), ("tokens", "accepted"))  # shown only where something was drafted


def _figure(told: dict[str, Any], place: tuple[str, ...]) -> float | None:
    value: Any = told
    for part in place:
        value = value[part]
    return None if value is None else value if isinstance(value, int) else float(value)


def _tiles(told: dict[str, Any]) -> str:
    tiles = "".join(
        tile(term, _figure(told, place), unit, explained)
        for term, place, unit, explained in _NUMBERS
        if told["tokens"]["drafted"] or place not in _OF_DRAFTS
    )
    return f'<div class="tiles">{tiles}</div>'


def compared_html(one: Record, other: Record) -> str:
    """The numbers of two requests next to each other, and how many times the second is the first."""
    left, right = explanation(one), explanation(other)
    rows = []
    for term, place, unit, explained in _NUMBERS:
        a, b = _figure(left, place), _figure(right, place)
        if a or b or place not in _OF_DRAFTS:
            name = f'<span title="{escape(explained)}">{term}{f", {unit}" if unit else ""}</span>'
            rows.append([name, figure(a), figure(b), f"{b / a:.2f}×" if a and b is not None else "–"])
    names = [(escape(short_id(record.request_id, 10)), "right", record.request_id) for record in (one, other)]
    columns = (("", "", ""), *names, ("ratio", "right", "The second divided by the first"))
    return f'<div class="card"><h2>Two requests compared</h2>{table(columns, rows, "compared")}</div>'


def _events(told: dict[str, Any]) -> str:
    if not told["events"]:
        hint = "The engine tells its story when the request has ended." if told["state"] == "running" else ""
        return f'<div class="card soft small">{hint or "The engine has no story of this request."}</div>'
    rows = "".join(
        f"<li><time>{event['at_ms']:,.1f} ms</time><span>{escape(event['words'])}</span></li>"
        for event in told["events"]
    )
    return f'<div class="card"><h2>What happened</h2><ol class="events">{rows}</ol></div>'


def _line(record: Record) -> str:
    """Tokenise and send to the engine, wait, prefill, decode to scale, with a tick for every token that left."""
    story, end_s = record.story, record.ended_s
    if story is None or end_s is None or end_s <= record.received_s:
        return ""
    scale = _WIDTH / (end_s - record.received_s)

    def at(time_s: float) -> float:
        return min(_WIDTH, max(0.0, (time_s - record.received_s) * scale))

    admitted_s = story.admitted_s if story.admitted_s is not None else end_s
    first_s = story.first_token_s if story.first_token_s is not None else end_s
    edges = [record.received_s, story.arrived_s, admitted_s, first_s, end_s]
    names = ("tokenize and send", "queue", "prefill", "decode")
    inks = ("ink-6", "ink-free", "ink-prefill", "ink-decode")
    bars = "".join(
        f'<rect class="{ink}" x="{at(start):.1f}" y="{_BAR_Y}" width="{max(0.6, at(end) - at(start)):.1f}" '
        f'height="{_BAR_HEIGHT}"><title>{name}: {milliseconds(max(0.0, end - start))}</title></rect>'
        for name, ink, start, end in zip(names, inks, edges[:-1], edges[1:], strict=True)
    )
    times = record.token_times_s[:: max(1, len(record.token_times_s) // _MOST_TICKS)]
    ticks = "".join(f"M{at(time_s):.1f} {_BAR_Y + _BAR_HEIGHT + 3}v6" for time_s in times)
    legend = "".join(
        f'<span><i class="{ink}"></i>{name} {milliseconds(max(0.0, end - start))}</span>'
        for name, ink, start, end in zip(names, inks, edges[:-1], edges[1:], strict=True)
    )
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} 42" preserveAspectRatio="none" style="height: 42px">{bars}'
        f'<path d="{ticks}" stroke="currentColor" stroke-opacity=".45"/></svg><div class="legend">{legend}</div>'
    )
