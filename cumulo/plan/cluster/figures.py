"""Figures of a cluster plan as people read them, with unit and range. Its report and its command print them."""

from cumulo.base import quantities
from cumulo.plan.cluster.sheet import Figure, Sheet

_ROUNDED = ("s", "h", "W", "B", "B/s", "tokens/s", "USD", "GB/s", "MWh", "days")


def value(figure: Figure) -> str:
    """A figure as people read it, with its unit: percent, MW, TB, minutes."""
    amount, unit = figure.value, figure.unit.replace("bytes", "B")
    if unit == "share":
        return f"{quantities.number(100.0 * amount, '%')}%"
    if amount == int(amount) and abs(amount) < 1e6 and unit not in _ROUNDED:
        return f"{int(amount):,} {unit}".strip()  # counts are exact
    return quantities.quantity(*_decimal(float(amount), unit))


def in_own_unit(figure: Figure) -> str:
    """A figure in the unit that formulas reckon with."""
    amount, unit = figure.value, "" if figure.unit == "share" else figure.unit
    if amount == int(amount) and abs(amount) < 1e6 and unit not in _ROUNDED:
        return f"{int(amount):,} {unit}".strip()
    return f"{quantities.number(float(amount))} {unit}".strip()


def _decimal(amount: float, unit: str) -> tuple[float, str]:
    """Storage and networks are sold in powers of ten."""
    return (amount / 1e9, f"G{unit}") if unit in ("B", "B/s") else (amount, unit)


def value_range(sheet: Sheet, name: str) -> str:
    """Where nine of ten results are expected; empty: the figure has no range of its own."""
    low, high = sheet.figures.get(f"{name}_low"), sheet.figures.get(f"{name}_high")
    if low is None or high is None:
        return ""
    unit = low.unit.replace("bytes", "B")
    if unit == "share":
        return quantities.between(100 * low.value, 100 * high.value, "%")
    high_value, shown_unit = _decimal(high.value, unit)
    return quantities.between(_decimal(low.value, unit)[0], high_value, shown_unit)
