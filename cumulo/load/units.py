"""Durations and numbers as people type them on the command line; called wherever an option is parsed."""

import re

from cumulo.errors import CumuloError

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)\s*", re.IGNORECASE)


def parse_duration_s(text: str, what: str = "a duration") -> float:
    """'500ms', '2s', '1.5m' or plain seconds, as seconds."""
    match = _DURATION.fullmatch(text)
    if match is None or match[2].lower() not in _SECONDS:
        raise CumuloError(f"{what} must look like 500ms, 2s or 1.5m, got {text!r}")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_number(text: str, what: str, least: float = 0.0, more_than: bool = False) -> float:
    """A number of at least (or more than) `least`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (value > least if more_than else value >= least) or value == float("inf"):
        raise CumuloError(
            f"{what} must be a number {'above' if more_than else 'of at least'} {least:g}, got {text!r}"
        )
    return value


def parse_count(text: str, what: str, least: int = 1) -> int:
    """A whole number of at least `least`."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise CumuloError(f"{what} must be a whole number of at least {least}, got {text!r}")
    return value


def show_duration(seconds: float | None) -> str:
    """Seconds for a person: three digits and the unit that suits them."""
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds and abs(seconds) * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if abs(seconds) < 1000 else f"{seconds:,.0f} s"
