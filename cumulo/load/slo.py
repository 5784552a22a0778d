"""The load generator's service-level objective: how it is typed, and when a level holds it. Pure.

`Slo` (spec) judges single requests (for goodput); `verdict` judges a level from how many kept it, with the
confidence the search relies on.
"""

import math
from typing import Literal

from cumulo.base.quantities import parse_duration_s
from cumulo.errors import CumuloError
from cumulo.spec.slo import Slo

Verdict = Literal["holds", "fails", "unclear"]
CONFIDENCE_Z = 1.645  # one-sided 95%


def parse_slo(text: str, share: float = 0.95) -> Slo:
    """'ttft=500ms,itl=50ms,e2e=10s'."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name.lower() not in ("ttft", "itl", "tpot", "e2e"):
            raise CumuloError(
                f"--slo must look like ttft=500ms,itl=50ms,tpot=40ms,e2e=10s; got {part!r} in it"
            )
        if value[-1:].isdigit():  # 500 would be eight minutes
            raise CumuloError(
                f"--slo needs units: write {name}={value}ms or {name}={value}s; got {part.strip()!r}"
            )
        if f"{name.lower()}_s" in bounds:
            raise CumuloError(f"--slo says {name.lower()} twice; got {text!r}")
        bounds[f"{name.lower()}_s"] = parse_duration_s(value, f"the SLO's {name}")
    if not 0 < share < 1:
        raise CumuloError(f"--slo-share must lie between 0 and 1, got {share:g}; 0.95 is usual")
    return Slo(**bounds, share=share)


def parse_promise(text: str, share: float = 0.95) -> Slo:
    """What a server promises, or a simulation judges by: 'ttft=500ms,itl=40ms'."""
    slo = parse_slo(text, share)
    if slo.tpot_s is not None or slo.e2e_s is not None:
        raise CumuloError("a server can promise ttft and itl: remove tpot and e2e from --slo")
    return slo


def wilson_interval(met: int, total: int, z: float = CONFIDENCE_Z) -> tuple[float, float]:
    """Where the true share lies, given `met` of `total` (Wilson, 1927)."""
    if total == 0:
        return 0.0, 1.0
    share, spread = met / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def verdict(met: int, total: int, share: float) -> Verdict:
    """Whether the share is reached, missed, or cannot be told yet from so few requests."""
    low, high = wilson_interval(met, total)
    if low >= share:
        return "holds"
    return "fails" if high < share else "unclear"


def requests_needed(share: float) -> int:
    """The fewest requests that can show a share when all of them keep the objective."""
    return math.ceil(CONFIDENCE_Z**2 * share / (1 - share))


def is_lost(missed: int, planned: int, share: float) -> bool:
    """Whether a trial of `planned` requests must fail even if all the others keep the objective."""
    return verdict(planned - missed, planned, share) == "fails"
