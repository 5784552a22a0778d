"""A rehearsal of autoscaling rules on a trace: ours, and HPA's and KEDA's with targets that were tuned on an
earlier part of it. `cumulo simulate autoscale` prints it.

    plan = Rehearsal(replica, slo, start_up_s=60, limits=ScalingLimits(1, 16))
    plan.play(parse_rule("hpa-concurrency=20"), traffic)
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.decide.autoscale.limits import ScalingLimits
from cumulo.cluster.decide.autoscale.rivals import METRICS, HpaRule
from cumulo.cluster.decide.autoscale.rule import ForecastRule
from cumulo.cluster.decide.autoscale.seen import ReplicaSpeed, ScalingRule
from cumulo.cluster.simulate.autoscale import AutoscaledFleet
from cumulo.cluster.simulate.autoscale_member import EngineMember, PlayedReplica
from cumulo.cluster.simulate.autoscale_result import ScaledRun
from cumulo.cluster.simulate.autoscale_sketch import SketchReplica
from cumulo.engine.decide.routing import router
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.errors import ConfigError
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.split import NETWORK_SHARE, landing_blocks
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.slo import Slo

FORECAST = "forecast"
NAMES = (FORECAST, *(f"{who}-{metric}" for who in ("hpa", "keda") for metric in METRICS))
# Targets per replica that tuning tries, and what is usual without.
TARGETS = {
    "queue": (0.25, 0.5, 1.0, 2.0, 4.0),
    "concurrency": (10.0, 15.0, 20.0, 30.0, 45.0),
    "utilization": (0.5, 0.7, 0.8, 0.9),
}
USUAL = {"queue": 2.0, "concurrency": 20.0, "utilization": 0.7}
_JITTER_S = 5.0  # between the copies of a request


@dataclass(frozen=True, slots=True)
class RuleName:
    name: str
    target: float | None = None  # None: to be tuned, or what is usual

    @property
    def metric(self) -> str:
        return self.name.partition("-")[2]

    def __str__(self) -> str:
        return self.name if self.target is None else f"{self.name}={self.target:g}"


def parse_rule(text: str) -> RuleName:
    name, equals, target = text.strip().partition("=")
    if name not in NAMES:
        raise ConfigError(f"there is no autoscaling rule {name}{did_you_mean(name, NAMES)}")
    if not equals:
        return RuleName(name)
    if name == FORECAST:
        raise ConfigError("the rule forecast has no target: it learns from the SLO; write --rule forecast")
    try:
        return RuleName(name, float(target))
    except ValueError:
        raise ConfigError(f"the target of {name} must be a number, got {target!r}") from None


@dataclass(frozen=True, slots=True)
class Rehearsal:
    replica: Replica
    slo: Slo
    start_up_s: float
    limits: ScalingLimits
    begin_with: Mapping[str, int] | int = 1  # replicas, by role where prefill and decode are apart
    routing: str = "least-loaded"

    def play(
        self, chosen: RuleName, traffic: Traffic, speed: ReplicaSpeed, *, roughly: bool = False
    ) -> ScaledRun:
        """`roughly`: with sketched replicas, some ten times as fast; fleet, router and rule are the same."""
        return self.play_rule(self.rule(chosen, speed), str(chosen), traffic, roughly=roughly)

    def play_rule(
        self, rule: ScalingRule, name: str, traffic: Traffic, *, roughly: bool = False
    ) -> ScaledRun:
        fleet = AutoscaledFleet(
            self._maker(traffic, roughly),
            lambda: router(self.routing),
            rule,
            self.slo,
            self.start_up_s,
            begin_with=self.begin_with,
            name=name,
            transfer_s=self._transfer_s(),
            block_size=self.replica.engine_config().block_size,
        )
        return fleet.serve(traffic.arrivals)

    def _maker(self, traffic: Traffic, roughly: bool) -> Callable[[str], PlayedReplica]:
        replica = self.replica
        config, cost = replica.scheduler().config, replica.cost()
        if roughly:
            return lambda role: SketchReplica(config, cost)
        landing = landing_blocks(replica, traffic) if isinstance(self.begin_with, Mapping) else 0

        def exact(role: str) -> PlayedReplica:
            if role == "decode":  # the transfer is counted on the way
                engine = SimulatedEngine(replica.scheduler(landing), replica.cost(float("inf")))
            else:
                engine = SimulatedEngine(replica.scheduler(), replica.cost())
            return EngineMember(engine)

        return exact

    def _transfer_s(self) -> Callable[[int], float]:
        replica = self.replica
        token_s = replica.work().kv_bytes_per_token / (NETWORK_SHARE * replica.node.nic_bytes_per_s)
        return lambda tokens: tokens * token_s + replica.fabric.latency_s

    def rule(self, chosen: RuleName, speed: ReplicaSpeed) -> ScalingRule:
        if chosen.name == FORECAST:
            return ForecastRule(speed, self.start_up_s, self.slo, self.limits)
        target = USUAL[chosen.metric] if chosen.target is None else chosen.target
        return HpaRule(chosen.metric, target, self.limits, keda=chosen.name.startswith("keda"))

    def tuned(
        self,
        chosen: RuleName,
        traffic: Traffic,
        speed: ReplicaSpeed,
        tell: Callable[[str], None] = lambda text: None,
    ) -> RuleName:
        """With its best target on this traffic: the cheapest that keeps the SLO, or else the nearest to it. All
        targets are played roughly."""
        if chosen.name == FORECAST or chosen.target is not None:
            return chosen
        runs: list[tuple[ScaledRun, RuleName]] = []
        for target in TARGETS[chosen.metric]:
            candidate = replace(chosen, target=target)
            tell(f"tuning {candidate}")
            runs.append((self.play(candidate, traffic, speed, roughly=True), candidate))
        return best_of(runs, self.slo.share)


def best_of(runs: Sequence[tuple[ScaledRun, RuleName]], share: float) -> RuleName:
    good = [one for one in runs if one[0].attainment >= share]
    if good:
        return min(good, key=lambda one: one[0].replica_hours)[1]
    return max(runs, key=lambda one: one[0].attainment)[1]


def copied(traffic: Traffic, copies: int, seed: int = 0) -> Traffic:
    """Each request so many times, the copies up to a few seconds later: more of the same users at the same hour."""
    if copies == 1:
        return traffic
    rng = random.Random(f"{seed}/copies")
    found = [
        replace(one, arrived_s=one.arrived_s + (rng.uniform(0.0, _JITTER_S) if copy else 0.0))
        for copy in range(copies)
        for one in traffic.arrivals
    ]
    return Traffic(tuple(sorted(found, key=lambda one: one.arrived_s)))


def parted(traffic: Traffic, share: float) -> tuple[Traffic | None, Traffic]:
    """What came within the first share of the time, to tune on, and the rest, to judge by."""
    if not share:
        return None, traffic
    end_s = share * traffic.arrivals[-1].arrived_s
    first = tuple(one for one in traffic.arrivals if one.arrived_s < end_s)
    rest = tuple(
        replace(one, arrived_s=one.arrived_s - end_s) for one in traffic.arrivals if one.arrived_s >= end_s
    )
    if not first or not rest:
        raise ConfigError(f"--train {share:g} leaves one part of the trace empty; 0.33 is usual")
    return Traffic(first), Traffic(rest)
