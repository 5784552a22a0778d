"""What one replica serves within the SLO, rehearsed: the speed that the forecast rule divides load by. Called by
`cumulo simulate autoscale` and `cumulo launch`.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

from cumulo.engine.simulate.engine import simulate
from cumulo.engine.simulate.run import Arrival, Run
from cumulo.errors import ConfigError
from cumulo.fleet.decide.scaling import ReplicaSpeed
from cumulo.plan.serve.capacity import MOST_RATE, highest_rate
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.slo import Slo

_SAMPLE = 600  # requests of the trace that the search plays
_BATCH = 32  # sequences that decode together, to weigh an output token against a prompt token
_USUAL_TTFT_S, _USUAL_TPOT_S = 2.0, 0.1  # where the SLO has no such bound


def replica_speed(replica: Replica, traffic: Traffic, slo: Slo, seed: int = 0) -> ReplicaSpeed:
    """The highest Poisson rate of this traffic's requests that one replica serves within the SLO, as the tokens per
    second of prompts and of answers whose work fills it."""
    sample = poisson_sample(traffic, _SAMPLE, seed)
    rate = _highest_rate(replica, sample, slo)
    prompt, output, _ = sample.means()
    cost = replica.cost()
    decode = cost.decode(_BATCH)
    output_s = decode.fixed_s / _BATCH if decode is not None else 0.02 / _BATCH
    prompt_s = prompt_token_s(replica)
    # One request's work is 1 / rate; its parts are as the device's times are.
    whole_s = prompt * prompt_s + output * output_s
    slower = 1 / (rate * whole_s)
    return ReplicaSpeed(1 / (prompt_s * slower), 1 / (output_s * slower), _saturated(replica, sample, rate))


def split_speed(replica: Replica, traffic: Traffic, slo: Slo, seed: int = 0) -> ReplicaSpeed:
    """The same where prefill and decode have replicas of their own: prompts as one computes them within the bound
    on TTFT, answers as one draws them within the bound on the time per token."""
    sample = poisson_sample(traffic, _SAMPLE, seed)
    prompts = Traffic(tuple(replace(one, output_tokens=1) for one in sample.arrivals))
    answers = Traffic(
        tuple(replace(one, output_tokens=max(2, one.output_tokens), shared=()) for one in sample.arrivals)
    )
    first = Slo(ttft_s=slo.ttft_s or slo.e2e_s or _USUAL_TTFT_S, share=slo.share)
    later = slo.of_role("decode") or Slo(tpot_s=_USUAL_TPOT_S, share=slo.share)

    def decode(arrivals: tuple[Arrival, ...]) -> Run:
        landed = [replace(one, first_token_s=one.arrived_s) for one in arrivals]
        return simulate(landed, replica.scheduler(), replica.cost(), itl_bound_s=later.itl_s)

    prompt, output, _ = sample.means()
    rates = _highest_rate(replica, prompts, first), _highest_rate(replica, answers, later, decode)
    ended_s = decode(tuple(replace(one, arrived_s=0.0) for one in answers.arrivals)).ended_s
    drawn = len(answers.arrivals) / (ended_s * rates[1])  # when all are drawn at once
    return ReplicaSpeed(
        rates[0] * prompt, rates[1] * output, _saturated(replica, prompts, rates[0]), max(1.0, drawn)
    )


def _saturated(replica: Replica, sample: Traffic, rate: float) -> float:
    """Requests per second when they all wait, over those within the SLO."""
    run, _ = replica.serve(tuple(replace(one, arrived_s=0.0) for one in sample.arrivals))
    return max(1.0, len(sample.arrivals) / (run.ended_s * rate))


def prompt_token_s(replica: Replica) -> float:
    """Device time of a prompt's token, from a prompt that is alone."""
    tokens = min(2048, (replica.max_context or replica.spec.max_context) - 1)
    run, _ = replica.serve((Arrival(0.0, tokens, 1),))
    first_s = run.served[0].first_token_s
    assert first_s is not None
    return first_s / tokens


def poisson_sample(traffic: Traffic, count: int, seed: int) -> Traffic:
    """Requests spread over the trace, at one per second on average, with the gaps of a Poisson process."""
    every = max(1, len(traffic.arrivals) // count)
    rng = random.Random(f"{seed}/poisson")
    times_s = itertools.accumulate(rng.expovariate(1.0) for _ in itertools.count())
    return Traffic(
        tuple(
            replace(one, arrived_s=time_s)
            for one, time_s in zip(traffic.arrivals[::every][:count], times_s, strict=False)
        )
    )


def _highest_rate(
    replica: Replica, sample: Traffic, slo: Slo, play: Callable[[tuple[Arrival, ...]], Run] | None = None
) -> float:
    """`play`: how one replica serves; None: it does both, prefill and decode."""

    def holds(rate: float) -> bool:
        arrivals = sample.at_rate(rate).arrivals
        run = replica.serve(arrivals, itl_bound_s=slo.itl_s)[0] if play is None else play(arrivals)
        answered = [times for one in run.served if (times := one.times()) is not None]
        kept = sum(slo.missed(times) is None for times in answered)
        return kept >= slo.share * len(run.served)

    rate = highest_rate(holds, 1.0, 0.03)
    if not rate:
        raise ConfigError(f"one replica cannot keep {slo} even for single requests: use a looser SLO")
    return min(rate, MOST_RATE)
