"""Promised: what a planned server keeps of the SLO if it promises it (`cumulo serve --slo`). Part of a plan."""

from dataclasses import dataclass
from typing import Literal

from cumulo.plan.serve.goodput import play_goodput
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.slo import Slo


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
