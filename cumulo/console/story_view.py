"""A request's story as HTML: the numbers, its phases on a line, and its events in words. For the requests page."""

from html import escape
from typing import Any

from cumulo.console.words import clock_time
from cumulo.serve.stories import Record, explanation

_WIDTH, _BAR_Y, _BAR_HEIGHT = 900, 8, 22
_MOST_TICKS = 400


def story_html(record: Record, badge: str) -> str:
    told = explanation(record)
    error = f'<p class="words" style="color: var(--bad)">{escape(record.error)}</p>' if record.error else ""
    return (
        f'<div class="card"><h2 class="mono">{escape(record.request_id)} {badge}</h2>'
        f'<p class="words">{escape(told["summary"])}</p>{error}{_line(record)}'
        f'<p class="soft small" style="margin: 8px 0 0">received at {clock_time(record.received_s)} from '
        f"{escape(record.caller)}, {'streamed' if record.stream else 'answered at once'}"
        f"{f', {record.samples} samples' if record.samples > 1 else ''}</p></div>"
        f"{_tiles(told)}{_events(told)}"
    )


def _tiles(told: dict[str, Any]) -> str:
    times, tokens = told["times_ms"], told["tokens"]
    tiles = (
        ("prompt tokens", tokens["prompt"], ""),
        ("from the cache", tokens["cached"], ""),
        ("output tokens", tokens["output"], ""),
        ("recomputed", tokens["recomputed"], ""),
        ("preemptions", told["preemptions"], ""),
        ("queued", times["queued"], "ms"),
        ("first token", times["first_token"], "ms"),
        ("median gap", times["gap_median"], "ms"),
        ("longest gap", times["gap_max"], "ms"),
        ("total", times["total"], "ms"),
    )
    return '<div class="tiles">' + "".join(tile(*one) for one in tiles) + "</div>"


def tile(name: str, value: float | None, unit: str) -> str:
    text = "–" if value is None else f"{value:,}" if isinstance(value, int) else _rounded(value)
    return f"<div class=tile><span>{escape(name)}</span><b>{text}<small>{escape(unit)}</small></b></div>"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


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
    """Tokenise, wait, prefill, decode to scale, with a tick for every token that left."""
    story, end_s = record.story, record.ended_s
    if story is None or end_s is None or end_s <= record.received_s:
        return ""
    scale = _WIDTH / (end_s - record.received_s)

    def at(time_s: float) -> float:
        return min(_WIDTH, max(0.0, (time_s - record.received_s) * scale))

    admitted_s = story.admitted_s if story.admitted_s is not None else end_s
    first_s = story.first_token_s if story.first_token_s is not None else end_s
    edges = [record.received_s, record.submitted_s, admitted_s, first_s, end_s]
    names = ("tokenised", "until admitted", "prefill", "decode")
    inks = ("ink-6", "ink-free", "ink-prefill", "ink-decode")
    bars = "".join(
        f'<rect class="{ink}" x="{at(start):.1f}" y="{_BAR_Y}" width="{max(0.6, at(end) - at(start)):.1f}" '
        f'height="{_BAR_HEIGHT}"><title>{name}: {(end - start) * 1e3:.1f} ms</title></rect>'
        for name, ink, start, end in zip(names, inks, edges[:-1], edges[1:], strict=True)
    )
    times = record.token_times_s[:: max(1, len(record.token_times_s) // _MOST_TICKS)]
    ticks = "".join(f"M{at(time_s):.1f} {_BAR_Y + _BAR_HEIGHT + 3}v6" for time_s in times)
    legend = "".join(
        f'<span><i class="{ink}"></i>{name} {max(0.0, end - start) * 1e3:,.1f} ms</span>'
        for name, ink, start, end in zip(names, inks, edges[:-1], edges[1:], strict=True)
    )
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} 42" preserveAspectRatio="none" style="height: 42px">{bars}'
        f'<path d="{ticks}" stroke="currentColor" stroke-opacity=".45"/></svg><div class="legend">{legend}</div>'
    )
