"""Numbers as people type them on the command line, and durations as they read them. The load generator's options
and reports call it."""

from cumulo.errors import CumuloError


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
