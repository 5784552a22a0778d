"""Mistakes in a network's design and settings, found before they cost a run. `cumulo network lint` prints the
findings that the rules of this folder make."""

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
