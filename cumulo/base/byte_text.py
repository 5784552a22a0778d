"""Sizes as people type them: 512, 64KiB, 1GiB, 2.5GB. The verbs call it."""

import re

from cumulo.errors import ConfigError

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
