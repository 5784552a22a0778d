"""Numbers as people read and type them: 28 s, 5.7 TB, 1.62 M tokens/s, 64KiB, 500ms.

Reports and the verbs' sentences are written with it; options, SLOs and job files are read with it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cumulo.errors import ConfigError, CumuloError

MIB, GIB = 1 << 20, 1 << 30  # bytes
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
# Each ladder: a unit's size and its name, smallest first. A value is written in the largest unit it fills.
_LADDERS: tuple[tuple[tuple[float, str], ...], ...] = (
    ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (_MINUTE_S, "min"), (_HOUR_S, "h"), (_DAY_S, "days")),
    tuple((1024.0**power, name) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))),
    tuple((1000.0**power, name) for power, name in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))),
    ((1.0, "FLOP"), (1e9, "GFLOP"), (1e12, "TFLOP"), (1e15, "PFLOP")),
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
    """A range in the unit of its high end: "3.1 to 4.2 s"; in two where its ends are far apart: "4 ms to 3 s"."""
    size, scaled_unit = scale(high, unit)
    if 0 < abs(low) < 0.01 * size:
        return f"{quantity(low, unit)} to {quantity(high, unit)}"
    return f"{number(low / size, scaled_unit)} to {number(high / size, scaled_unit)} {scaled_unit}".strip()


_UNITS = {"": 1.0, "b": 1.0}
_UNITS |= {f"{letter}ib": 1024.0**power for power, letter in enumerate("kmgtp", 1)}
_UNITS |= {f"{letter}b": 1000.0**power for power, letter in enumerate("kmgtp", 1)}
_UNITS |= {letter: 1024.0**power for power, letter in enumerate("kmgtp", 1)}  # as nccl-tests means 8G
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str, what: str = "a size") -> float:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{what} must look like 512, 64KiB, 1GiB or 2.5GB, got {text!r}")
    return float(match[1]) * _UNITS[match[2].lower()]


_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SECONDS["d"] = 24 * 3600.0
_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)\s*", re.IGNORECASE)


def parse_duration_s(
    text: str, what: str = "a duration", wanted: str = "look like 500ms, 2s or 1.5m"
) -> float:
    """In seconds; a number without a unit is one of seconds. `wanted`: what it must do, for the error."""
    match = _DURATION.fullmatch(text)
    if match is None or match[2].lower() not in _SECONDS:
        raise ConfigError(f"{what} must {wanted}, got {text!r}")
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


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """A figure as predicted, beside how it turned out. The ledgers of the planner, the engine and the trainer are
    made of such lines."""

    name: str
    predicted: float
    measured: float | None = None
    how: str = ""  # what the prediction rests on, in words
    unit: str = "bytes"
