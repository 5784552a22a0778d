"""Times and sizes as people write them in job files: 30min, 8GiB."""

import re

from cumulo.errors import ConfigError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str, what: str) -> float:
    """`seconds("30min", "deadline")` is 1800.0."""
    if (match := _DURATION.fullmatch(str(text).strip())) is None:
        raise ConfigError(f"{what} must be a time such as 90s, 30min, 2h or 1d, got {text!r}")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def memory_mib(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB)", text.strip())
    if match is None:
        raise ConfigError(f"devices.memory must be a size such as 512MiB or 8GiB, got {text!r}")
    return int(float(match[1]) * {"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20}[match[2]])
