"""Times and sizes as people write them in job files: 30min, 8GiB."""

import re

from cumulo.base.quantities import parse_duration_s
from cumulo.errors import ConfigError


def seconds(text: str, what: str) -> float:
    """`seconds("30min", "deadline")` is 1800.0."""
    return parse_duration_s(str(text), what, "be a time such as 90s, 30min, 2h or 1d")


def memory_mib(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB)", text.strip())
    if match is None:
        raise ConfigError(f"devices.memory must be a size such as 512MiB or 8GiB, got {text!r}")
    return int(float(match[1]) * {"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20}[match[2]])
