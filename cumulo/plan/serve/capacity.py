"""How much traffic one replica can take: the highest rate that keeps the objective. Commands and search ask it.

A simulated trial has no noise: at one rate the answer is always the same, so doubling and bisection suffice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cumulo.base.quantities import quantity
from cumulo.errors import ConfigError
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import ServeReport, report
from cumulo.plan.serve.traffic import Traffic, check_rate
from cumulo.spec.slo import Slo

LEAST_RATE, MOST_RATE = 1e-3, 1e5


@dataclass(frozen=True, slots=True)
class RateTrial:
    rate: float
    report: ServeReport
    holds: bool

    def users(self, think_s: float) -> float:
        """People who each wait for an answer, think, and ask again: Little's law (1961) around the whole loop."""
        answer = self.report.e2e_s
        return self.rate * (think_s + (answer.mean if answer is not None else 0.0))


@dataclass(frozen=True, slots=True)
class Capacity:
    rate: float  # the highest that holds
    trials: tuple[RateTrial, ...]  # by rate

    @property
    def best(self) -> RateTrial:
        return max((one for one in self.trials if one.holds), key=lambda one: one.rate)

    def limit(self, slo: Slo) -> str:
        """What gives way first beyond the highest rate, and why, in words."""
        beyond = [one for one in self.trials if one.rate > self.rate and not one.holds]
        return (beyond[0] if beyond else self.best).report.limit(slo)

    def users(self, think_s: float) -> float:
        return replace(self.best, rate=self.rate).users(think_s)


def play(replica: Replica, traffic: Traffic, percentile: float = 99.0, slower: float = 1.0) -> ServeReport:
    """One run of one replica; `slower` than predicted by so much."""
    blocks = replica.memory().kv_blocks
    run, cost = replica.serve(traffic.arrivals, slower)
    return report(run, blocks, cost.spent(run), percentile, replica.front_door_s)


def play_between(replica: Replica, traffic: Traffic, percentile: float) -> tuple[ServeReport, ServeReport]:
    """The same with every step as much faster, and slower, as predictions of this replica may be wrong."""
    sure = replica.confidence
    return play(replica, traffic, percentile, sure.fastest), play(replica, traffic, percentile, sure.slowest)


def highest_rate(holds: Callable[[float], bool], start: float, tolerance: float) -> float:
    """Doubles (or halves) from `start` until the limit is enclosed, then halves the enclosed ratio. Returns 0 where
    no rate holds, and infinity where all do."""
    low = high = start
    if holds(start):
        while holds(high := high * 2):
            low = high
            if high > MOST_RATE:
                return math.inf
    else:
        while not holds(low := low / 2):
            high = low
            if low < LEAST_RATE:
                return 0.0
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def find_capacity(
    play_at: Callable[[float], ServeReport],
    slo: Slo,
    *,
    start: float = 1.0,
    tolerance: float = 0.02,
) -> Capacity:
    check_rate(start)
    trials: dict[float, RateTrial] = {}

    def holds(rate: float) -> bool:
        result = play_at(rate)
        trials[rate] = RateTrial(rate, result, result.holds(slo))
        return trials[rate].holds

    rate = highest_rate(holds, start, tolerance)
    if rate == math.inf:
        raise ConfigError(
            f"{MOST_RATE:,.0f} requests/s and more meet the SLO, so there is no highest rate to find; use longer "
            "requests"
        )
    if not rate:
        raise ConfigError(_hopeless(trials[min(trials)].report, slo))
    return Capacity(rate, tuple(trials[rate] for rate in sorted(trials)))


def _hopeless(alone: ServeReport, slo: Slo) -> str:
    """A request that has the replica to itself misses the objective: say what it would take."""
    if alone.refused:
        return f"requests of this traffic can never run there: {alone.why_refused}"
    reached = []
    for name in alone.misses(slo):
        spread = getattr(alone, f"{name}_s")
        objective = getattr(slo, f"{name}_s")
        reached.append(f"{name} {quantity(spread.at_slo, 's')} against {quantity(objective, 's')}")
    return (
        f"even one request at a time misses the objective: {', '.join(reached)}; bounded by {alone.bound_by}: "
        "take a faster device, more tensor parallelism, 8-bit weights, or a looser objective"
    )


# How much more traffic a deployment would take, as a range, and how many users fit. The search asks it.
#
# Steps that all take f times as long do at rate r what usual steps do at rate r·f, with every latency f times as
# long. So one series of runs, on a grid of rates, tells the capacity of a replica for fast, expected and slow
# steps.
_GRID = 1.05  # from one rate to the next


@dataclass(slots=True)
class RateGrid:
    """Runs of one replica by rate, each played once."""

    play_at: Callable[[float], ServeReport]
    share: float  # of the traffic that the replica gets
    slo: Slo
    reports: dict[int, ServeReport] = field(default_factory=dict)

    def rate(self, place: int) -> float:
        return self.share * _GRID**place

    def report(self, place: int) -> ServeReport:
        found = self.reports.get(place)
        if found is None:
            found = self.reports[place] = self.play_at(self.rate(place))
        return found

    def capacity(self, slower: float, most_rate: float) -> Capacity:
        """The highest rate that holds when steps take so many times as long as expected; at most `most_rate`."""
        shift = round(math.log(slower) / math.log(_GRID))
        slower = _GRID**shift

        def holds(place: int) -> bool:
            return self.report(place + shift).stretched(slower).holds(self.slo)

        low, high = 0, max(1, math.ceil(math.log(most_rate / self.share) / math.log(_GRID)))
        if not holds(low):
            while not holds(low := low - 2):
                if self.rate(low) < self.share / 20:
                    break
            high = min(high, low + 2)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return Capacity(self.rate(low), self._trials(slower, shift))

    def _trials(self, slower: float, shift: int) -> tuple[RateTrial, ...]:
        found = []
        for place in sorted(self.reports):
            report = self.reports[place].stretched(slower)
            found.append(RateTrial(self.rate(place - shift), report, report.holds(self.slo)))
        return tuple(found)

    def curve(self, capacity: Capacity) -> tuple[RateTrial, ...]:
        """From little traffic to more than the replica can take, as expected: by rate."""
        for part in (0.3, 0.6):
            self.report(round(math.log(part * capacity.rate / self.share) / math.log(_GRID)))
        every = self._trials(1.0, 0)
        beyond = [one for one in every if one.rate > capacity.rate]
        return (*(one for one in every if one.rate <= capacity.rate), *beyond[:3])
