"""A rehearsal of autoscaling rules on a trace: ours, and HPA's and KEDA's with targets that were tuned on an
earlier part of it. `cumulo simulate autoscale` prints it.

    plan = Rehearsal(replica, slo, start_up_s=60, limits=ScalingLimits(1, 16))
    plan.play(parse_rule("hpa-concurrency=20"), traffic)
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cumulo.base.nearest import did_you_mean
from cumulo.engine.decide.routing import router
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.run import Arrival
from cumulo.errors import ConfigError
from cumulo.fleet.decide.forecast_rule import ForecastRule
from cumulo.fleet.decide.hpa_rule import METRICS, HpaRule
from cumulo.fleet.decide.scaling import FleetSeen, ReplicaSpeed, ScaleTo, ScalingLimits, ScalingRule
from cumulo.fleet.simulate.autoscaled_fleet import AutoscaledFleet, ScaledRun
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.split import NETWORK_SHARE
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.slo import Slo

_BIN_S = 2.0
_BINS = 3  # over which load is averaged


@dataclass(slots=True)
class OracleRule:
    """A rule that knows the trace to come: what foresight would save, and so what no real rule can be asked for. It
    orders replicas a start-up before they are needed, and lets them go when they are not needed for a start-up."""

    speed: ReplicaSpeed
    start_up_s: float
    arrivals: Sequence[Arrival]
    limits: ScalingLimits
    headroom: float = 1.0  # replicas for each that the load needs; found with hindsight
    interval_s: float = 5.0
    _needs: dict[str, list[float]] = field(default_factory=dict)

    def decide(self, seen: FleetSeen) -> list[ScaleTo]:
        wanted = []
        for role in seen.roles:
            if role not in self._needs:
                self._needs[role] = needs(self.speed, role, self.arrivals)
            first = max(0, int(seen.now_s / _BIN_S) - 1)
            last = int((seen.now_s + self.start_up_s + self.interval_s) / _BIN_S) + 1
            need = max(self._needs[role][first : last + 1], default=0.0)
            count = max(1, math.ceil(self.headroom * need - 0.05))
            wanted.append(ScaleTo(role, count, f"{need:.2f} replicas will be needed within the start-up"))
        return self.limits.apply(wanted)


def needs(speed: ReplicaSpeed, role: str, arrivals: Sequence[Arrival]) -> list[float]:
    """Replicas that each two seconds of the trace need, averaged with those before."""
    work_s = [0.0] * (int(arrivals[-1].arrived_s / _BIN_S) + 1)
    for one in arrivals:
        work = speed.work_s(role, one.prompt_tokens, one.output_tokens) / speed.at_most(role)
        work_s[int(one.arrived_s / _BIN_S)] += work
    found = []
    for at in range(len(work_s)):
        around = work_s[max(0, at - _BINS + 1) : at + 1]
        found.append(speed.needed(sum(around) / (len(around) * _BIN_S), role))
    return found


FORECAST, ORACLE = "forecast", "oracle"
NAMES = (FORECAST, ORACLE, *(f"{who}-{metric}" for who in ("hpa", "keda") for metric in METRICS))
# Targets per replica that tuning tries, and what is usual without.
TARGETS = {
    "queue": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    "concurrency": (1.0, 2.0, 4.0, 7.0, 10.0, 15.0, 20.0, 30.0, 45.0),
    "utilization": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
}
USUAL = {"queue": 2.0, "concurrency": 20.0, "utilization": 0.7}
_HEADROOMS = tuple(0.05 * step for step in range(8, 41))  # that hindsight tries for the oracle
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
        self, chosen: RuleName, traffic: Traffic, speed: ReplicaSpeed, *, earlier: Traffic | None = None
    ) -> ScaledRun:
        """`earlier`: what came before, which the forecast rule remembers."""
        fleet = AutoscaledFleet(
            lambda role: SimulatedEngine(self.replica.scheduler(), self.replica.cost()),
            lambda: router(self.routing),
            self.rule(chosen, speed, traffic, earlier),
            self.slo,
            self.start_up_s,
            begin_with=self.begin_with,
            name=str(chosen),
            transfer_s=self._transfer_s(),
            block_size=self.replica.engine_config().block_size,
        )
        return fleet.serve(traffic.arrivals)

    def begun(self, chosen: RuleName, earlier: Traffic, speed: ReplicaSpeed) -> "Rehearsal":
        """With the replicas to begin with that this rule has at the end of the earlier traffic."""
        looks = self.play(chosen, earlier, speed).looks
        last = {
            look.role: max(1, look.wanted) for look in looks if look.time_s <= earlier.arrivals[-1].arrived_s
        }
        if isinstance(self.begin_with, int):
            return replace(self, begin_with=last.get("both", self.begin_with))
        return replace(self, begin_with={**self.begin_with, **last})

    def _transfer_s(self) -> Callable[[int], float]:
        replica = self.replica
        token_s = replica.work().kv_bytes_per_token / (NETWORK_SHARE * replica.node.nic_bytes_per_s)
        return lambda tokens: tokens * token_s + replica.fabric.latency_s

    def rule(
        self, chosen: RuleName, speed: ReplicaSpeed, traffic: Traffic, earlier: Traffic | None = None
    ) -> ScalingRule:
        if chosen.name == ORACLE:
            return OracleRule(speed, self.start_up_s, traffic.arrivals, self.limits, chosen.target or 1.0)
        if chosen.name == FORECAST:
            made = ForecastRule(speed, self.start_up_s, self.slo, self.limits)
            if earlier is not None:
                looks = _looks(earlier, made.interval_s)
                for role in ("both",) if isinstance(self.begin_with, int) else self.begin_with:
                    made.remember(role, looks)
            return made
        target = USUAL[chosen.metric] if chosen.target is None else chosen.target
        return HpaRule(chosen.metric, target, self.limits, keda=chosen.name.startswith("keda"))

    def tuned(
        self,
        chosen: RuleName,
        earlier: Traffic,
        judged: Traffic,
        speed: ReplicaSpeed,
        tell: Callable[[str], None] = lambda text: None,
    ) -> RuleName:
        """With its best target on the earlier traffic: the cheapest that keeps the SLO, or else the nearest to it.
        The oracle is tuned on what it is judged by."""
        if chosen.name == FORECAST or chosen.target is not None:
            return chosen
        targets, traffic = TARGETS.get(chosen.metric, ()), earlier
        if chosen.name == ORACLE:
            targets, traffic = _HEADROOMS, judged
        runs: list[tuple[ScaledRun, RuleName]] = []
        # A higher target is cheaper and keeps less, a higher headroom the other way round: halve the list.
        cheaper = targets if chosen.name != ORACLE else tuple(reversed(targets))
        low, high = 0, len(cheaper)
        while low < high:
            middle = (low + high) // 2
            candidate = replace(chosen, target=cheaper[middle])
            tell(f"tuning {candidate}")
            runs.append((self.play(candidate, traffic, speed), candidate))
            holds = runs[-1][0].attainment >= self.slo.share
            low, high = (middle + 1, high) if holds else (low, middle)
        return best_of(runs, self.slo.share)


def _looks(traffic: Traffic, interval_s: float) -> list[tuple[int, int, int]]:
    """What came in each interval: requests, prompt tokens, output tokens."""
    found = [(0, 0, 0)] * (int(traffic.arrivals[-1].arrived_s / interval_s) + 1)
    for one in traffic.arrivals:
        at = int(one.arrived_s / interval_s)
        requests, prompt, output = found[at]
        found[at] = (requests + 1, prompt + one.prompt_tokens, output + one.output_tokens)
    return found


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
