"""Deployment: replicas of one kind and what they would do, priced. Ranked by the search, shown by the command."""

from dataclasses import dataclass, replace
from typing import Literal

from cumulo.base.quantities import quantity
from cumulo.engine.decide.speculation.choose import MOST_DRAFTED
from cumulo.errors import OutOfMemory
from cumulo.plan.serve.goodput import play_goodput
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import ServeReport
from cumulo.plan.serve.step_cost import StepLoad, pairs
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.slo import Slo


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kind of replica, before anything is simulated."""

    replica: Replica
    split: bool  # prefill and decode apart
    most_rate: float  # no replica of this kind can take more; 0: a request alone misses the objective
    why_not: str = ""  # where it cannot be used at all
    fits: bool = True  # into memory
    runnable: bool = True  # by `cumulo serve`
    options: tuple[Replica, ...] = ()  # the same with engine options that may let fewer do, the fewest first

    def is_of(self, deployment: "Deployment") -> bool:
        """Whether it is the kind of a deployment, which may have chosen smaller steps and further options."""
        chosen = deployment.replica.without_options()
        usual = replace(
            chosen, max_tokens_per_step=self.replica.max_tokens_per_step, max_running=self.replica.max_running
        )
        return usual == self.replica and self.split == (deployment.prefill_replicas > 0)

    def least_price(self, rate: float) -> float:
        """USD per hour that so much traffic costs at least."""
        if self.most_rate <= 0:
            return float("inf")
        together = self.replica.dp  # engines that share their experts come together
        least = max(2 if self.split else 1, -(-rate // (self.most_rate * together)))
        return least * together * self.replica.price_per_hour


@dataclass(frozen=True, slots=True)
class Deployment:
    replica: Replica
    replicas: int  # of the decode kind, where the two are split
    prefill_replicas: int  # 0: every replica does both
    rate: float  # of all traffic
    report: ServeReport  # of one replica with its share of it, at the pessimistic end of the prediction
    output_tokens: float  # of an answer, on average

    @property
    def gpus(self) -> int:
        return (self.replicas + self.prefill_replicas) * self.replica.ranks

    @property
    def price_per_hour(self) -> float:
        return (self.replicas + self.prefill_replicas) * self.replica.price_per_hour

    @property
    def price_per_million_tokens(self) -> float:
        """Of output in the steady state, USD: all traffic is answered while it keeps coming."""
        return 1e6 * self.price_per_hour / (3600 * self.output_tok_s)

    @property
    def output_tok_s(self) -> float:
        """Of all replicas in the steady state, without the start and the end of the simulated traffic."""
        return self.rate * self.output_tokens

    def __str__(self) -> str:
        if self.prefill_replicas:
            return f"{self.prefill_replicas} prefill + {self.replicas} decode replicas of {self.replica}"
        return f"{self.replicas} replica{'s' if self.replicas > 1 else ''} of {self.replica}"


def candidate(replica: Replica, split: bool, traffic: Traffic, slo: Slo) -> Candidate:
    """What can be said of a kind of replica without simulating it, at the pessimistic end of its step times.

    A replica's device is busy with every request at least for what each of its tokens adds to a step; and where the
    objective bounds the gap between tokens, what a step costs before its first token is paid at least once in each
    such gap. So it can take at most (1 - fixed / gap) / busy requests per second, and as many on each stage of a
    pipeline, which has its part of both.
    """
    try:
        replica.memory()
    except OutOfMemory as error:
        return Candidate(replica, split, 0.0, _short(str(error)), fits=False)
    cost, slow = replica.cost(), replica.confidence.slowest
    prompt, output, shared = traffic.means()
    fresh = max(1, round(prompt - shared)) if replica.prefix_cache else round(prompt)
    one_s, two_s = (sum(cost.parts(StepLoad(4096 * n, 1, 1, 0, 0, 0, 0))) for n in (1, 2))
    token_s = (two_s - one_s) / 4096
    context = prompt + output / 2
    kv_s = sum(cost.parts(StepLoad(1, 1, 1, 1 << 20))) - sum(cost.parts(StepLoad(1, 1, 1)))
    busy_s = fresh * token_s * slow
    if not split:
        # A step yields all its drafts at best, and where sequences share a prefix, caches help to read it.
        drawn = output / (1 + MOST_DRAFTED if replica.acceptance else 1)
        kv_share = 1 / replica.profile.shared_kv_speedup if replica.prefix_cache else 1.0
        busy_s += slow * drawn * (token_s + kv_share * context * kv_s / (1 << 20))
    step_s = slow * sum(cost.parts(StepLoad(1, 1, 1, round(prompt))))
    room = 1.0
    if slo.itl_s is not None and not split:
        if step_s > slo.itl_s:
            return Candidate(replica, split, 0.0, f"one sequence alone takes {quantity(step_s, 's')} a token")
        room = 1 - step_s / replica.pp / slo.itl_s
    first_s = slow * sum(cost.parts(StepLoad(fresh, 1, 1, 0, 0, pairs(round(shared), fresh), fresh)))
    if slo.ttft_s is not None and first_s > slo.ttft_s:
        return Candidate(
            replica, split, 0.0, f"a prompt of {fresh:,} new tokens alone takes {quantity(first_s, 's')}"
        )
    return Candidate(replica, split, room * replica.pp / busy_s)


def _short(reason: str) -> str:
    """Of why a model does not fit, what a buyer needs."""
    loaded = "; weights are loaded before they are quantised" if "loaded before" in reason else ""
    return reason.partition(": ")[0] + loaded


@dataclass(frozen=True, slots=True)
class Promised:
    late: Literal["refuse", "queue"]  # what the server does with requests that it cannot promise it to
    unpromised_share: float  # of all requests: those
    kept_share: float  # of the others: those that keep it


def promised(replica: Replica, traffic: Traffic, slo: Slo) -> Promised | None:
    """At the pessimistic end of step times. Requests that the plan counts on are not turned away: where more could
    not be promised than the SLO lets miss it, they are served without a promise. None: nothing can be promised."""
    slow = replica.confidence.slowest
    refusing = play_goodput(replica, traffic, slo, promise=True, slower=slow)
    if refusing.refused_share <= 1 - slo.share:
        return Promised("refuse", refusing.refused_share, refusing.kept_share)
    queueing = play_goodput(replica, traffic, slo, promise=True, late="queue", slower=slow)
    if not queueing.admitted:
        return None
    return Promised("queue", queueing.refused_share, queueing.kept_share)
