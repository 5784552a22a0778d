"""Numbers as the console writes them. Used by every page."""

import time
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
