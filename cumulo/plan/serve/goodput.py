"""Goodput: requests per second that kept an SLO, of a simulated replica. For `cumulo simulate serve --promise`
and `cumulo plan serve`, whose plan promises the SLO.

Every request is judged on its own, by the rule of cumulo/spec/slo.py.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.slo import learning_prompts
from cumulo.engine.simulate.run import Arrival, Served
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.slo import Slo


@dataclass(frozen=True, slots=True)
class Goodput:
    requests: int
    admitted: int  # and promised the SLO, if it is promised at all
    kept: int
    missed_ttft: int
    missed_itl: int
    span_s: float  # in which requests arrived
    output_tok_s: float  # of answers that kept it

    @property
    def request_s(self) -> float:
        return self.kept / self.span_s

    @property
    def refused_share(self) -> float:
        """The share of all requests that were not admitted, or that are served without a promise."""
        return 1 - self.admitted / self.requests

    @property
    def kept_share(self) -> float:
        """The share of admitted requests that kept it: what a promise is worth."""
        return self.kept / self.admitted if self.admitted else 1.0


def play_goodput(
    replica: Replica,
    traffic: Traffic,
    slo: Slo,
    *,
    promise: bool,
    late: Literal["refuse", "queue"] = "refuse",
    slower: float = 1.0,
) -> Goodput:
    """`promise`: schedule by the SLO as `cumulo serve --slo` does; without, in steps of fixed size. `late`:
    what is done with requests whose promise cannot be kept. `slower`: than predicted by so much."""
    scheduler = replica.scheduler()
    if promise:
        scheduler = Scheduler(replace(scheduler.config, slo=slo, slo_late=late))
        _learn(scheduler, replica, slower)
    engine = replica.engine_of(scheduler, replica.cost(slower=slower))
    engine.arrivals = list(traffic.arrivals)
    engine.run.itl_bound_s = slo.itl_s
    engine.advance(float("inf"))
    run = engine.end()
    admitted = [one for one in run.served if one.refused is None and (one.promised or not promise)]
    outcomes = [_outcome(one, slo) for one in admitted]
    kept = [one for one, outcome in zip(admitted, outcomes, strict=True) if outcome == "kept"]
    counts = Counter(outcomes)
    span_s = traffic.arrivals[-1].arrived_s - traffic.arrivals[0].arrived_s
    tokens = sum(one.arrival.output_tokens for one in kept)
    return Goodput(
        len(run.served), len(admitted), len(kept), counts["ttft"], counts["itl"], span_s, tokens / span_s
    )


def _learn(scheduler: Scheduler, replica: Replica, slower: float) -> None:
    """What a server does before it is ready."""
    engine = replica.engine_of(scheduler, replica.cost(slower=slower))
    for tokens in learning_prompts(scheduler.costs, scheduler.config.slo, scheduler.config.max_context):
        engine.arrivals.append(Arrival(engine.clock_s, tokens, 3))
        engine.advance(float("inf"))
    engine.open_mail(float("inf"))
    scheduler.pool.clear_cache()


def _outcome(one: Served, slo: Slo) -> str:
    """The bound that a request missed, or that it kept them all, or was not answered."""
    times = one.times()
    return "not answered" if times is None else slo.missed(times) or "kept"
