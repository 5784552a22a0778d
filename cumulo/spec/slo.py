"""Slo: the service-level objective that requests must keep, and the one rule by which a request keeps it. The load
generator, the engine, the live autoscaler, its rehearsal and the serving planner all judge requests by it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cumulo.errors import ConfigError

ITL_SHARE = 0.99  # of a request's tokens must come within the bound on ITL
# Where prefill and decode have engines of their own, each is judged by the bounds that it can keep.
ROLE_BOUNDS = {"both": ("ttft", "itl", "tpot", "e2e"), "prefill": ("ttft",), "decode": ("itl", "tpot")}


@dataclass(frozen=True, slots=True)
class ServedTimes:
    """How long an answered request took. A time that a request does not have is None, and keeps every bound: an
    answer of one token has no time per token."""

    ttft_s: float | None
    tpot_s: float | None = None
    e2e_s: float | None = None
    gaps: int = 0  # times between two tokens of its answer, as far as its client can see them
    late_gaps: int = 0  # of these, the times that are longer than the bound on ITL

    @staticmethod
    def from_answer(
        ttft_s: float, rest_s: float, output_tokens: int, gaps: int = 0, late_gaps: int = 0
    ) -> "ServedTimes":
        """`rest_s`: from its first token to its last."""
        tpot_s = rest_s / (output_tokens - 1) if output_tokens > 1 else None
        return ServedTimes(ttft_s, tpot_s, ttft_s + rest_s, gaps, late_gaps)


class ServedRequest(Protocol):
    """A request as it was measured by its client."""

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
        """The bounds that are set, by name."""
        named = {"ttft": self.ttft_s, "itl": self.itl_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return {name: bound for name, bound in named.items() if bound is not None}

    @property
    def percentile(self) -> float:
        """The share in percent, as percentiles are named."""
        return round(100 * self.share, 9)

    @property
    def text(self) -> str:
        """The SLO as it is typed after --slo."""
        return ",".join(f"{name}={1e3 * bound:.12g}ms" for name, bound in self.bounds.items())

    def with_rest_of(self, usual: "Slo | None") -> "Slo":
        """This one, and the bounds of `usual` where it has none."""
        missing = {} if usual is None else {f"{name}_s": bound for name, bound in usual.bounds.items()}
        return replace(self, **(missing | {f"{name}_s": bound for name, bound in self.bounds.items()}))

    def of_role(self, role: str) -> "Slo | None":
        """The bounds that an engine of this role is judged by; None where the SLO has none of them."""
        bounds = {f"{name}_s": bound for name, bound in self.bounds.items() if name in ROLE_BOUNDS[role]}
        return Slo(**bounds, share=self.share) if bounds else None

    def missed(self, times: ServedTimes) -> str | None:
        """The name of the first bound that an answered request missed; None where it kept the SLO."""
        return missed_bound(self.bounds, times)

    def met_by(self, request: ServedRequest) -> bool:
        """A failed request never meets an objective."""
        if request.error is not None:
            return False
        itls_s = request.itls_s
        times = ServedTimes(
            request.ttft_s, request.tpot_s, request.e2e_s, len(itls_s), self.late_gaps(itls_s)
        )
        return self.missed(times) is None

    def late_gaps(self, itls_s: Sequence[float]) -> int:
        """How many of these times between two tokens are longer than the bound on ITL."""
        return 0 if self.itl_s is None else sum(itl_s > self.itl_s for itl_s in itls_s)

    def most_kept(self, share_within: Callable[[str, float], float]) -> float:
        """The share of requests that kept the SLO at most, where only the share that kept each bound is known."""
        return min(share_within(name, bound_s) for name, bound_s in self.bounds.items())

    def cannot_be_met(self, waited_s: float, has_first_token: bool) -> bool:
        """Whether a request still running has already missed it."""
        late_start = self.ttft_s is not None and not has_first_token and waited_s > self.ttft_s
        return late_start or (self.e2e_s is not None and waited_s > self.e2e_s)

    def __str__(self) -> str:
        named = [f"{name} ≤ {_shown(bound)}" for name, bound in self.bounds.items()]
        return f"{', '.join(named)} for {100 * self.share:.4g}% of requests"


def _shown(bound_s: float) -> str:
    return f"{1e3 * bound_s:.3g} ms" if bound_s < 0.9995 else f"{bound_s:.4g} s"


def missed_bound(bounds: Mapping[str, float], times: ServedTimes) -> str | None:
    """The rule: every time is within its bound, and 99% of the times between two tokens are within that on ITL."""
    measured = {"ttft": times.ttft_s, "tpot": times.tpot_s, "e2e": times.e2e_s}
    for name, bound_s in bounds.items():
        if name == "itl":
            if times.late_gaps > _may_be_late(times.gaps):
                return name
        elif (time_s := measured[name]) is not None and time_s > bound_s:
            return name
    return None


def kept_itl_s(itls_s: Sequence[float]) -> float | None:
    """The smallest bound on ITL that a request with these times between its tokens keeps; None: it has none."""
    return sorted(itls_s)[len(itls_s) - 1 - _may_be_late(len(itls_s))] if itls_s else None


def _may_be_late(gaps: int) -> int:
    return math.floor((1 - ITL_SHARE) * gaps + 1e-9)
