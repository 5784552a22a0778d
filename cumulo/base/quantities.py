"""Numbers as people read them: 28 s, 5.7 TB, 1.62 M tokens/s. Tables of reports and the verbs' sentences use it."""

import math
from collections.abc import Sequence

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
# Each ladder: a unit's size and its name, smallest first. A value is written in the largest unit it fills.
_LADDERS: tuple[tuple[tuple[float, str], ...], ...] = (
    ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (_MINUTE_S, "min"), (_HOUR_S, "h"), (_DAY_S, "days")),
    tuple((1024.0**power, name) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))),
    tuple((1000.0**power, name) for power, name in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))),
    ((1e-3, "kWh"), (1.0, "MWh"), (1e3, "GWh")),
    ((1.0, "W"), (1e3, "kW"), (1e6, "MW"), (1e9, "GW")),
    ((1.0, "USD"), (1e6, "million USD"), (1e9, "billion USD")),
    *(
        ((1.0, name), (1e6, f"M {name}"), (1e9, f"B {name}"), (1e12, f"T {name}"))
        for name in ("tokens", "tok", "parameters")
    ),
)
# 90 s and 100 min read better than 1.5 min and 1.67 h.
_AT_LEAST = {"min": 2.0, "h": 2.0, "days": 2.0}


def quantity(value: float, unit: str) -> str:
    """`quantity(0.00184, "s")` is "1.84 ms"."""
    size, scaled_unit = scale(value, unit)
    return f"{number(value if size == 1 else value / size, scaled_unit)} {scaled_unit}".strip()


def scale(value: float, unit: str) -> tuple[float, str]:
    """By what to divide a value, and the unit it then has: the one whose figure is short. "GB/s" scales as GB."""
    base, slash, rest = unit.partition("/")
    for ladder in _LADDERS:
        here = next((size for size, name in ladder if name == base), None)
        if here is None or not value or not math.isfinite(value):
            continue
        filled = [
            (size, name) for size, name in ladder if abs(value) * here >= size * _AT_LEAST.get(name, 0.9995)
        ]
        size, name = filled[-1] if filled else ladder[0]
        return size / here, f"{name}{slash}{rest}"
    return 1.0, unit


def number(value: float, unit: str = "") -> str:
    """Three digits that count, thousands apart, and no exponent where a person would not write one."""
    size = abs(value)
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    if unit == "%" and 0 < size < 0.01:
        return "< 0.01" if value > 0 else "> -0.01"
    return f"{float(f'{value:.3g}'):,.0f}" if size >= 999.5 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share of a whole to a tenth of a percent: three digits that count at most."""
    return f"{share:.1%}" if abs(share) < 0.9995 else f"{number(100 * share)}%"


def column(values: Sequence[float], unit: str) -> tuple[list[str], str]:
    """Figures that stand below one another, all in the unit of the largest, and that unit."""
    size, shared_unit = scale(max(values, key=abs, default=0.0), unit)
    scaled = [value / size for value in values]
    return [number(each) if abs(each) >= 0.001 or not each else "< 0.001" for each in scaled], shared_unit


def between(low: float, high: float, unit: str) -> str:
    """A range in one unit, that of its high end: "3.1 to 4.2 s"."""
    size, scaled_unit = scale(high, unit)
    return f"{number(low / size, scaled_unit)} to {number(high / size, scaled_unit)} {scaled_unit}".strip()
