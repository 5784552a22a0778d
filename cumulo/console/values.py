"""Numbers as the console writes them. Used by every page."""

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape

from cumulo.base.quantities import number, quantity, scale

_EPOCH_S = time.time() - time.perf_counter()


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else quantity(seconds, "s")


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
    """`value`: a text stands as it is; None is not known. A number is in the unit that suits it."""
    size = 1.0
    if isinstance(value, (int, float)):
        size, unit = scale(value, unit)
    return (
        f'<div class="tile" tabindex="0" data-tip="{escape(explained)}"><span>{escape(term)}</span>'
        f"<b>{figure(value, size)}<small>{escape(unit) if value is not None else ''}</small></b></div>"
    )


def figure(value: float | str | None, size: float = 1.0) -> str:
    """Three digits that count, or the text; – where it is not known. `size`: of its unit."""
    if value is None or isinstance(value, str):
        return escape(value or "–")
    return number(value if size == 1 else value / size)


Columns = Sequence[tuple[str, str, str]]  # of a table: name, classes, tooltip


def table(columns: Columns, rows: Iterable[Sequence[str] | str], kind: str = "") -> str:
    """A table whose cells are HTML; right-aligned columns have numbers. A row that is a text is taken as it is."""
    head = "".join(
        f'<th class="{classes}" title="{escape(tip)}">{name}</th>' for name, classes, tip in columns
    )
    styles = [classes.replace("right", "right num") for _, classes, _ in columns]

    def line(row: Sequence[str] | str) -> str:
        if isinstance(row, str):
            return row
        cells = (f'<td class="{style}">{cell}</td>' for style, cell in zip(styles, row, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(map(line, rows))
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
