"""Fault: something that a text names and that explains a symptom; `explained` puts the two together.

A bandwidth shows that something is slow. What makes it slow is named elsewhere in the text: a setting, a counter,
the state of a GPU, a card or a switch. A fault says which symptoms it explains, and whether a run is called healthy
next to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cumulo.plan.diagnose.diagnosis import Diagnosis

SLOW_NODE = frozenset({"pcie-not-nvlink", "slow-link", "nvls-off", "shared-path", "late-rank", "unknown"})
SLOW_NETWORK = frozenset(
    {"slow-link", "no-gdr", "wrong-nic", "rail-down", "congested", "oversubscribed", "shared-path", "unknown"}
)
SLOW = SLOW_NODE | SLOW_NETWORK
FAILED = frozenset({"failed", "unknown", "late-rank", "no-connection"})
# Causes that numbers alone suggest, however surely: a named fault tells why.
_SYMPTOMS = frozenset({"unknown", "slow-link", "congested", "failed", "nvls-off", "no-connection"})
_FULL = 1.02  # of what is expected: nothing is lost


@dataclass(frozen=True, slots=True)
class Fault:
    cause: str
    sentence: str
    words: str  # what the text says
    steps: tuple[str, ...]
    explains: frozenset[str]
    against: bool = False  # a run is not called healthy next to it
    sure: bool = False  # it also explains what a log says surely, because it is the reason for that
    confidence: str = "high"


def explained(found: Diagnosis, faults: Sequence[Fault]) -> Diagnosis:
    """The first fault that explains what was found; otherwise what was found."""
    for fault in faults:
        if found.cause == "healthy" and fault.against:
            return _despite(found, fault)
        symptom = fault.sure or found.cause in _SYMPTOMS or found.confidence != "high"
        if found.cause in fault.explains and symptom:
            return _because(found, fault)
    return found


def _because(found: Diagnosis, fault: Fault) -> Diagnosis:
    said = (f"the text says: {fault.words[:160]}",) if fault.words else ()
    return replace(
        found,
        cause=fault.cause,
        sentence=fault.sentence,
        evidence=(*said, *found.evidence),
        next_steps=fault.steps,
        confidence=fault.confidence,
    )


def _despite(found: Diagnosis, fault: Fault) -> Diagnosis:
    if found.share is None or found.share <= _FULL:
        return replace(_because(found, fault), confidence="medium")
    doubt = f"The bandwidth is what is usual, and yet: {fault.sentence} Check that this run uses it."
    return replace(_because(found, fault), cause="unknown", sentence=doubt, confidence="low")
