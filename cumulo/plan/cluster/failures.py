"""Failures and checkpoints: how much of a long job's time is training, by formula and by simulation. The cluster
planner calls it.

Symbols: M mean time to failure of the whole job, C time that a checkpoint stops training, τ training between two
checkpoints, R time from a failure until training goes on. Failures come at random, independently (exponential).
"""

import heapq
import math
import random
import statistics
from dataclasses import dataclass, replace

from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recovery:
    """What happens between failures, and after one. Seconds."""

    mttf_s: float  # M
    checkpoint_s: float  # C
    restart_s: float  # R
    least_interval_s: float = 0.0  # the last checkpoint must be away before the next
    # After a failure the newest checkpoint may still be on its way: so much older is the one that is used.
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.mttf_s > 0:
            raise ConfigError(f"the mean time to failure must be more than 0 s, got {self.mttf_s}")
        for name in ("checkpoint_s", "restart_s", "least_interval_s", "delay_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")


def young_interval_s(recovery: Recovery) -> float:
    """√(2CM) (Young 1974, equation 1)."""
    return math.sqrt(2 * recovery.checkpoint_s * recovery.mttf_s)


def daly_interval_s(recovery: Recovery) -> float:
    """Higher order, good also where checkpoints are not short against M (Daly 2006, equation 37)."""
    share = recovery.checkpoint_s / (2 * recovery.mttf_s)
    if share >= 1:
        return recovery.mttf_s
    root = math.sqrt(share)
    return young_interval_s(recovery) * (1 + root / 3 + share / 9) - recovery.checkpoint_s


def best_interval_s(recovery: Recovery) -> float:
    return max(daly_interval_s(recovery), recovery.least_interval_s, 1.0)


def ettr(recovery: Recovery, interval_s: float) -> float:
    """Training over all time: τ ÷ (M e^((R+d)/M) (e^((τ+C)/M) − 1)), d the delay (Daly 2006, equation 20): exact
    when failures also strike checkpoints and restarts, each of which then begins anew."""
    m = recovery.mttf_s
    exponent = (interval_s + recovery.checkpoint_s + recovery.restart_s + recovery.delay_s) / m
    if exponent > 500:
        return 0.0
    again = math.exp((recovery.restart_s + recovery.delay_s) / m)
    return interval_s / (m * again * math.expm1((interval_s + recovery.checkpoint_s) / m))


@dataclass(frozen=True, slots=True)
class Spares:
    """Nodes beside the job's, and how long a broken one is away."""

    nodes: int
    repair_s: float
    broken_share: float  # of failures, those after which a node must be repaired


@dataclass(frozen=True, slots=True)
class FailureOutcome:
    """The outcome of simulated runs: mean shares of all time, and where 90 of 100 runs have their training
    share."""

    ettr: float
    ettr_low: float
    ettr_high: float
    checkpoints: float
    lost: float  # trained again after a failure
    restarts: float
    no_spare: float  # waiting for a repair
    failures: float  # of one run


def simulate(
    recovery: Recovery, interval_s: float, spares: Spares, days: float, runs: int = 100, seed: int = 0
) -> FailureOutcome:
    """Plays `runs` jobs of `days`, failure by failure."""
    draw = random.Random(seed)
    played = [_play(recovery, interval_s, spares, days * 86400, draw) for _ in range(runs)]
    trained = sorted(run.ettr for run in played)
    return replace(
        played[0],
        **{
            name: statistics.fmean(getattr(run, name) for run in played)
            for name in ("ettr", "checkpoints", "lost", "restarts", "no_spare", "failures")
        },
        ettr_low=trained[int(0.05 * runs)],
        ettr_high=trained[runs - 1 - int(0.05 * runs)],
    )


def _play(
    recovery: Recovery, interval_s: float, spares: Spares, length_s: float, draw: random.Random
) -> FailureOutcome:
    cycle_s = interval_s + recovery.checkpoint_s
    now = trained = checkpoints = lost = restarts = waits = 0.0
    failures = 0
    in_repair: list[float] = []  # when each broken node comes back
    while True:
        # Training until the next failure. A checkpoint counts once it is away.
        alive = min(draw.expovariate(1 / recovery.mttf_s), length_s - now)
        kept = int(max(0.0, alive - recovery.delay_s) / cycle_s)
        now += alive
        if now >= length_s:
            cycles = int(alive / cycle_s)
            rest = min(alive - cycles * cycle_s, interval_s)
            trained += cycles * interval_s + rest
            checkpoints += alive - cycles * interval_s - rest
            break
        trained += kept * interval_s
        checkpoints += kept * recovery.checkpoint_s
        lost += alive - kept * cycle_s
        # Failures during a restart begin it anew.
        while True:
            failures += 1
            if draw.random() < spares.broken_share:
                heapq.heappush(in_repair, now + spares.repair_s)
            while in_repair and in_repair[0] <= now:
                heapq.heappop(in_repair)
            if len(in_repair) > spares.nodes:
                back = heapq.nsmallest(len(in_repair) - spares.nodes, in_repair)[-1]
                waits += min(back, length_s) - now
                now = back
            next_failure = draw.expovariate(1 / recovery.mttf_s)
            took = min(next_failure, recovery.restart_s, max(0.0, length_s - now))
            restarts += took
            now += took
            if next_failure >= recovery.restart_s or now >= length_s:
                break
        if now >= length_s:
            break
    share = 1 / length_s
    return FailureOutcome(
        trained * share, 0, 0, checkpoints * share, lost * share, restarts * share, waits * share, failures
    )


def spares_needed(nodes: int, broken_per_node_day: float, repair_days: float, risk: float = 0.01) -> int:
    """The fewest spare nodes with which more are in repair at once for at most `risk` of the time: nodes in
    repair are Poisson-distributed around nodes × rate × repair time (an M/G/∞ queue)."""
    mean = nodes * broken_per_node_day * repair_days
    if mean == 0:
        return 0
    count, probability = 0, math.exp(-mean) if mean < 700 else 0.0
    if not probability:  # too many for the sum: the normal limit of the same distribution
        return math.ceil(mean + statistics.NormalDist().inv_cdf(1 - risk) * math.sqrt(mean))
    below = probability
    while below < 1 - risk:
        count += 1
        probability *= mean / count
        below += probability
    return count
