"""Slo: the service-level objective that requests must keep. The load generator judges measured requests by it, the
serving planner and the simulator predicted percentiles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cumulo.errors import ConfigError

ITL_SHARE = 0.99  # of a request's tokens must come within the bound on ITL


class ServedTimes(Protocol):
    """A request as it was served, or failed."""

    @property
    def error(self) -> str | None: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def e2e_s(self) -> float | None: ...
    @property
    def itls_s(self) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds; None leaves that figure free."""

    ttft_s: float | None = None  # time to first token
    itl_s: float | None = None  # between two tokens of an answer
    tpot_s: float | None = None  # per output token, averaged over an answer
    e2e_s: float | None = None
    share: float = 0.95  # of the requests must keep it

    def __post_init__(self) -> None:
        if not self.bounds:
            raise ConfigError("an SLO needs one bound or more: on ttft, itl, tpot or e2e")
        for name, bound in self.bounds.items():
            if not 0 < bound < math.inf:
                raise ConfigError(f"the SLO's {name} must be more than 0 s, got {bound:g}")
        if not 0 < self.share < 1:
            raise ConfigError(f"the SLO's share must be between 0 and 1, got {self.share:g}; 0.95 is usual")

    @property
    def bounds(self) -> dict[str, float]:
        """Those that are set, by name."""
        named = {"ttft": self.ttft_s, "itl": self.itl_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return {name: bound for name, bound in named.items() if bound is not None}

    @property
    def percentile(self) -> float:
        """The share in percent, as percentiles are named."""
        return round(100 * self.share, 9)

    @property
    def text(self) -> str:
        """As it is typed after --slo."""
        return ",".join(f"{name}={1e3 * bound:.12g}ms" for name, bound in self.bounds.items())

    def with_rest_of(self, usual: "Slo | None") -> "Slo":
        """This one, and the bounds of `usual` where it has none."""
        missing = {} if usual is None else {f"{name}_s": bound for name, bound in usual.bounds.items()}
        return replace(self, **(missing | {f"{name}_s": bound for name, bound in self.bounds.items()}))

    def met_by(self, request: ServedTimes) -> bool:
        """A failed request never meets an objective."""
        if request.error is not None:
            return False
        return (
            _within(request.ttft_s, self.ttft_s)
            and _within(request.tpot_s, self.tpot_s)
            and _within(request.e2e_s, self.e2e_s)
            and (self.itl_s is None or _share_within(request.itls_s, self.itl_s) >= ITL_SHARE)
        )

    def cannot_be_met(self, waited_s: float, has_first_token: bool) -> bool:
        """Whether a request still running has already missed it."""
        late_start = self.ttft_s is not None and not has_first_token and waited_s > self.ttft_s
        return late_start or (self.e2e_s is not None and waited_s > self.e2e_s)

    def __str__(self) -> str:
        named = [f"{name} ≤ {_shown(bound)}" for name, bound in self.bounds.items()]
        return f"{', '.join(named)} for {100 * self.share:.4g}% of requests"


def _shown(bound_s: float) -> str:
    return f"{1e3 * bound_s:.3g} ms" if bound_s < 0.9995 else f"{bound_s:.4g} s"


def _within(value: float | None, bound: float | None) -> bool:
    return bound is None or value is None or value <= bound


def _share_within(values: Sequence[float], bound: float) -> float:
    return sum(value <= bound for value in values) / len(values) if values else 1.0
