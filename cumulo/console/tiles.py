"""Tiles: numbers in a row, each with the field's term, its unit and a sentence that explains it. For all pages."""

from html import escape


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
