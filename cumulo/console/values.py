"""Numbers as the console writes them. Used by every page."""

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape

_EPOCH_S = time.time() - time.perf_counter()


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.{2 if seconds < 1e-3 else 3}g} ms"


def rate(per_second: float) -> str:
    """Three digits are enough to compare speeds: 7.35, 45.2, 1,310."""
    decimals = 2 if per_second < 10 else 1 if per_second < 100 else 0
    return f"{per_second:,.{decimals}f}"


def duration(seconds: float) -> str:
    """Days to seconds, the two largest parts."""
    parts: list[str] = []
    left = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def clock_time(monotonic_s: float) -> str:
    """A time of the clock that stories use, as the clock on the server's wall showed it."""
    return datetime.fromtimestamp(_EPOCH_S + monotonic_s).strftime("%H:%M:%S")


def short_id(request_id: str, length: int) -> str:
    """The beginning of a request's random part; of a call with several prompts, also which one it is: ab12…-3."""
    _, _, rest = request_id.replace("_", "-", 1).partition("-")  # chatcmpl-…, resp_…
    random, _, position = (rest or request_id).partition("-")
    return f"{random[:length]}-{position}" if position else random[:length]


def tile(term: str, value: float | str | None, unit: str, explained: str) -> str:
    """`value`: a text stands as it is; None is not known. From a second on, milliseconds are shown as seconds."""
    if unit == "ms" and isinstance(value, (int, float)) and value >= 1000:
        value, unit = value / 1000, "s"
    if value is None:
        unit = ""
    if isinstance(value, str):
        text = escape(value)
    else:
        text = "–" if value is None else f"{value:,}" if isinstance(value, int) else rounded(value)
    return (
        f'<div class="tile" tabindex="0" data-tip="{escape(explained)}"><span>{escape(term)}</span>'
        f"<b>{text}<small>{escape(unit)}</small></b></div>"
    )


def rounded(value: float) -> str:
    decimals = 0 if abs(value) >= 100 or value == 0 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{decimals}f}"


Columns = Sequence[tuple[str, str, str]]  # of a table: name, classes, tooltip


def table(columns: Columns, rows: Iterable[Sequence[str] | str], kind: str = "") -> str:
    """A table whose cells are HTML; right-aligned columns have numbers. A row that is a text is taken as it is."""
    head = "".join(
        f'<th class="{classes}" title="{escape(tip)}">{name}</th>' for name, classes, tip in columns
    )
    styles = [classes.replace("right", "right num") for _, classes, _ in columns]
    body = "".join(
        row
        if isinstance(row, str)
        else "".join(
            (
                "<tr>",
                *(f'<td class="{style}">{cell}</td>' for style, cell in zip(styles, row, strict=True)),
                "</tr>",
            )
        )
        for row in rows
    )
    return f'<table class="plain {kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def actions(event: str, names: Iterable[str], of: str) -> str:
    """Buttons at something with a name, each of which emits an event: what to do, and with what."""
    return "".join(
        f'<button aria-label="{what.capitalize()} {escape(of)}" data-of="{escape(of)}" '
        f"onclick=\"emitEvent('{event}', ['{what}', this.dataset.of])\">{what.capitalize()}</button>"
        for what in names
    )


def heading(title: str, explained: str = "") -> str:
    return f'<h2 title="{escape(explained)}">{escape(title)}</h2>'


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "–"
