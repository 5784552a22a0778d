"""The service-level objective: what a request must keep to count as good, and when a level holds it. Pure.

`Slo` judges single requests (for goodput); `verdict` judges a level from how many kept it, with the
confidence the search relies on.
"""

import math
from dataclasses import dataclass
from typing import Literal

from cumulo.errors import CumuloError
from cumulo.load.records import RequestRecord
from cumulo.load.units import parse_duration_s, show_duration

Verdict = Literal["holds", "fails", "unclear"]
CONFIDENCE_Z = 1.645  # one-sided 95%
ITL_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds; None leaves that figure free. `itl_s` bounds 99% of a request's gaps."""

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    share: float = 0.95  # of the requests must keep it

    def met_by(self, record: RequestRecord) -> bool:
        """A failed request never meets an objective."""
        if record.error is not None:
            return False
        return (
            _within(record.ttft_s, self.ttft_s)
            and _within(record.tpot_s, self.tpot_s)
            and _within(record.e2e_s, self.e2e_s)
            and (self.itl_s is None or _share_within(record.gaps_s, self.itl_s) >= ITL_SHARE)
        )

    def cannot_be_met(self, waited_s: float, has_first_token: bool) -> bool:
        """Whether a request still running has already missed it."""
        late_start = self.ttft_s is not None and not has_first_token and waited_s > self.ttft_s
        return late_start or (self.e2e_s is not None and waited_s > self.e2e_s)

    def __str__(self) -> str:
        bounds = {"ttft": self.ttft_s, "itl": self.itl_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        named = [f"{name} ≤ {show_duration(value)}" for name, value in bounds.items() if value is not None]
        return f"{', '.join(named)} for {self.share:.3g} of requests"


def _within(value: float | None, bound: float | None) -> bool:
    return bound is None or value is None or value <= bound


def _share_within(values: list[float], bound: float) -> float:
    return sum(value <= bound for value in values) / len(values) if values else 1.0


def parse_slo(text: str, share: float = 0.95) -> Slo:
    """'ttft=500ms,itl=50ms,e2e=10s'."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name.lower() not in ("ttft", "itl", "tpot", "e2e"):
            raise CumuloError(
                f"--slo must look like ttft=500ms,itl=50ms,tpot=40ms,e2e=10s; got {part!r} in it"
            )
        bounds[f"{name.lower()}_s"] = parse_duration_s(value, f"the SLO's {name}")
    if not 0 < share < 1:
        raise CumuloError(f"--slo-share must lie between 0 and 1, got {share:g}; 0.95 is usual")
    return Slo(**bounds, share=share)


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
