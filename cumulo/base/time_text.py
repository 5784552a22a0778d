"""Durations as people type them: 500ms, 2s, 30min, 1d. Options, SLOs and job files are read with it."""

import re

from cumulo.errors import ConfigError

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
