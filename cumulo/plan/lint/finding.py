"""Finding: one thing a lint says. All rules make them, the command prints them."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    rule: str  # pfc-deadlock, ecmp-collisions, ...
    what: str  # a sentence
    change: str  # what to do; "": nothing
    gain: str  # what that brings
    value: float | None = None  # the figure behind it, such as a slowdown
    low: float | None = None  # its interval, 90 percent
    high: float | None = None
