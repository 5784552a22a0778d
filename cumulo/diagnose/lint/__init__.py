"""Mistakes in a network's design and settings, found before they cost a run. `cumulo network lint` prints the
findings that the rules of this folder make."""

from dataclasses import dataclass
from typing import Any, Literal

from cumulo.diagnose.diagnosis import table

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


def finding(
    name: str,
    value: float | None = None,
    low: float | None = None,
    high: float | None = None,
    severity: Severity | None = None,
    **words: Any,
) -> Finding:
    """A finding of data/findings.yaml, with `words` in the places of {names}."""
    entry = table("findings.yaml")[name]
    what, change, gain = (entry.get(part, "").format(**words) for part in ("what", "change", "gain"))
    rule = entry.get("rule", name)
    return Finding(severity or entry["severity"], rule, what, change, gain, value, low, high)
