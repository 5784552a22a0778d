"""RequestJudge: which requests of a rehearsed fleet kept the SLO, for the run's totals and for what a rule is told.
One for each role, which is judged by its own bounds of the SLO, and the request by all of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from cumulo.cluster.simulate.autoscale_result import ScaledRun
from cumulo.engine.simulate.run import Arrival, Served
from cumulo.spec.slo import Slo


class RequestJudge:
    def __init__(self, slo: Slo, role: str, run: ScaledRun) -> None:
        self._slo, self._role, self._run = slo, role, run
        self._own = slo.of_role(role)
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
            times = one.times(arrival)
            if times is None or one.first_token_s is None:
                continue
            self._ended += 1
            self._outputs += 1
            self._output_tokens += arrival.output_tokens
            self._kept += self._own is None or self._own.missed(times) is None
            if self._role == "prefill" and arrival.output_tokens > 1:
                yield arrival, one.first_token_s
                continue
            self._run.answered += 1
            self._run.in_slo += self._slo.missed(times) is None
            self._run.ttft_s.append(one.first_token_s - arrival.arrived_s)

    def since_look(self) -> tuple[int, int]:
        """Requests of this role that ended, and those within its part of the SLO."""
        found = self._ended, self._kept
        self._ended = self._kept = 0
        return found

    @property
    def mean_output_tokens(self) -> float:
        return self._output_tokens / self._outputs if self._outputs else 0.0
