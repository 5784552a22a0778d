"""Promise: the TTFT and ITL that a request was promised, and what became of it. Part of the request's story."""

from dataclasses import dataclass
from typing import Literal

from cumulo.spec.slo import ServedTimes, Slo, missed_bound

Outcome = Literal["kept", "missed_ttft", "missed_itl"]


@dataclass(slots=True)
class Promise:
    ttft_s: float | None
    itl_s: float | None
    tokens: int = 0  # of its first sample, after the first one
    late_tokens: int = 0  # of these, that came later than itl_s after the one before
    worst_itl_s: float = 0.0
    last_token_s: float | None = None

    @staticmethod
    def from_slo(slo: Slo) -> "Promise":
        return Promise(slo.ttft_s, slo.itl_s)

    def note_token(self, now_s: float) -> None:
        if self.last_token_s is not None:
            waited_s = now_s - self.last_token_s
            self.tokens += 1
            self.worst_itl_s = max(self.worst_itl_s, waited_s)
            if self.itl_s is not None and waited_s > self.itl_s:
                self.late_tokens += 1
        self.last_token_s = now_s

    def outcome(self, ttft_s: float | None) -> Outcome:
        """`ttft_s`: as it was; None if it ended before its first token."""
        bounds = {"ttft": self.ttft_s, "itl": self.itl_s}
        promised = {name: bound_s for name, bound_s in bounds.items() if bound_s is not None}
        times = ServedTimes(ttft_s, gaps=self.tokens, late_gaps=self.late_tokens)
        missed = missed_bound(promised, times)
        if missed is None:
            return "kept"
        return "missed_ttft" if missed == "ttft" else "missed_itl"
