"""A request's story as HTML: the numbers, its phases on a line, and its events in words. For the requests page."""

from html import escape
from typing import Any

from cumulo.console.tiles import rounded, tile
from cumulo.console.words import clock_time, milliseconds, short_id
from cumulo.serve.observe.stories import Record, explanation

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


def _number(told: dict[str, Any], place: tuple[str, ...]) -> float | None:
    value: Any = told
    for part in place:
        value = value[part]
    return None if value is None else value if isinstance(value, int) else float(value)


def _tiles(told: dict[str, Any]) -> str:
    tiles = "".join(
        tile(term, _number(told, place), unit, explained)
        for term, place, unit, explained in _NUMBERS
        if told["tokens"]["drafted"] or place not in _OF_DRAFTS
    )
    return f'<div class="tiles">{tiles}</div>'


def compared_html(one: Record, other: Record) -> str:
    """The numbers of two requests next to each other, and how many times the second is the first."""
    left, right = explanation(one), explanation(other)
    rows = ""
    for term, place, unit, explained in _NUMBERS:
        a, b = _number(left, place), _number(right, place)
        if place in _OF_DRAFTS and not (a or b):
            continue
        ratio = f"{b / a:.2f}×" if a and b is not None else "–"
        rows += (
            f'<tr><td title="{escape(explained)}">{term}{f", {unit}" if unit else ""}</td>'
            f'<td class="right num">{_cell(a)}</td><td class="right num">{_cell(b)}</td>'
            f'<td class="right num">{ratio}</td></tr>'
        )
    names = "".join(
        f'<th class="right mono">{escape(short_id(record.request_id, 10))}</th>' for record in (one, other)
    )
    return (
        '<div class="card"><h2>Two requests compared</h2><table class="plain compared"><thead><tr><th></th>'
        f'{names}<th class="right" title="The second divided by the first">ratio</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else rounded(value)


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
