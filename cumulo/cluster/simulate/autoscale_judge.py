"""RequestJudge: which requests of a rehearsed fleet kept the SLO, for the run's totals and for what a rule is told.
One for each role: prefill is judged by TTFT, decode by the time per output token, and the request by both.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from cumulo.cluster.simulate.autoscale_result import ScaledRun
from cumulo.engine.simulate.run import Arrival, Served
from cumulo.spec.slo import Slo


class RequestJudge:
    def __init__(self, slo: Slo, role: str, run: ScaledRun) -> None:
        self._slo, self._role, self._run = slo, role, run
        self._whole: dict[int, Arrival] = {}  # by what a replica was given: the request it is part of
        self._ended = self._kept = 0
        self._outputs = self._output_tokens = 0

    def begin(self, arrival: Arrival) -> Arrival:
        """What the first role is given of a request: prefill draws one token."""
        if self._role != "prefill":
            return arrival
        part = replace(arrival, output_tokens=1)
        self.expect(part, arrival)
        return part

    def expect(self, part: Arrival, whole: Arrival) -> None:
        self._whole[id(part)] = whole

    def note(self, over: Iterable[Served]) -> Iterator[tuple[Arrival, float]]:
        """Judges; yields requests that decode has to go on with, and when their first token was drawn."""
        for one in over:
            arrival = self._whole.pop(id(one.arrival), one.arrival)
            if not one.finished or one.first_token_s is None or one.last_token_s is None:
                continue
            ttft_s, rest_s = one.first_token_s - arrival.arrived_s, one.last_token_s - one.first_token_s
            self._ended += 1
            self._outputs += 1
            self._output_tokens += arrival.output_tokens
            if self._role == "prefill":
                self._kept += self._slo.ttft_s is None or ttft_s <= self._slo.ttft_s
                if arrival.output_tokens > 1:
                    yield arrival, one.first_token_s
                    continue
            kept = keeps(self._slo, ttft_s, rest_s, arrival.output_tokens)
            if self._role == "decode":
                tpot_s = rest_s / max(1, arrival.output_tokens - 1)
                self._kept += self._slo.tpot_s is None or tpot_s <= self._slo.tpot_s
            elif self._role == "both":
                self._kept += kept
            self._run.answered += 1
            self._run.in_slo += kept
            self._run.ttft_s.append(ttft_s)

    def since_look(self) -> tuple[int, int]:
        """Requests of this role that ended, and those within its part of the SLO."""
        found = self._ended, self._kept
        self._ended = self._kept = 0
        return found

    @property
    def mean_output_tokens(self) -> float:
        return self._output_tokens / self._outputs if self._outputs else 0.0


def keeps(slo: Slo, ttft_s: float, rest_s: float, output_tokens: int) -> bool:
    """Whether a request kept the SLO; `rest_s`: from its first token to its last."""
    tpot_s = rest_s / max(1, output_tokens - 1)
    bounds = ((slo.ttft_s, ttft_s), (slo.tpot_s, tpot_s), (slo.e2e_s, ttft_s + rest_s))
    return all(bound is None or value <= bound for bound, value in bounds)
