"""Failures and checkpoints: how much of a long job's time is training, by formula and by simulation, and where
checkpoints go and how often. The cluster planner calls it.

Symbols: M mean time to failure of the whole job, C time that a checkpoint stops training, τ training between two
checkpoints, R time from a failure until training goes on. Failures come at random, independently (exponential).
"""

import heapq
import math
import random
import statistics
from dataclasses import dataclass, replace

from cumulo.errors import ConfigError, require_least
from cumulo.plan.cluster.goal import ClusterGoal
from cumulo.plan.cluster.sheet import Sheet, groups
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.states import optimizer_bytes_each


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
        require_least(self, 0, "checkpoint_s", "restart_s", "least_interval_s", "delay_s")


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


_DAYS, _RUNS = 30.0, 20
SIMULATED = f"simulated: {_RUNS} runs of {_DAYS:g} days, failure by failure"


@dataclass(frozen=True, slots=True)
class CheckpointTier:
    """One way to keep checkpoints: what stops training, what a failure costs, and how well it does."""

    name: str
    key: str  # in the sheet's names
    stall: str  # the figure of how long training stops
    away: str  # the figure of how long a checkpoint is on its way; "0": it is not
    what: str  # meanwhile
    recovery: Recovery
    interval_s: float  # best by formula
    ettr: float  # by formula


@dataclass(frozen=True, slots=True)
class SweepPoint:
    interval_s: float
    by_formula: float
    simulated: FailureOutcome


def storage(goal: ClusterGoal, job: TrainJob, sheet: Sheet) -> None:
    """Sizes and times that follow from the model, and what storage they ask for."""
    words = goal.model.vocab_size
    sheet.fill("failure range")
    given = {
        "state_bytes_each": optimizer_bytes_each(job, 2),
        "token_bytes": 2 if words <= 65536 else 4,
        **{f"spare_nodes_{end}": spares_at(sheet, sheet[f"failures_{end}"]) for end in ("low", "high")},
    }
    sheet.fill("checkpoint", given, vocabulary=f"{words:,}")


def spares_at(sheet: Sheet, failures: float) -> int:
    """The spare nodes that a failure rate per 1,000 node-days of 8-GPU nodes asks for."""
    broken = failures / 1000 * sheet["gpus_per_node"] / 8 * sheet["broken_share"]
    return spares_needed(int(sheet["nodes"]), broken, sheet["repair"] / 24)


# From a failure until training continues, in the sheet's names, by what happens then.
_PAUSES = {
    "restart": "detect + initialise_s + {load}",
    "spare": "swap + {load}",
    "replica": "regroup + step_s",
}


def checkpoint_tiers(sheet: Sheet, after_failure: str = "restart") -> list[CheckpointTier]:
    found = []
    copied = "while parts are copied to host memory"
    for key, name, what, stall, away, load in (
        ("written", "storage, training stops", "until all is written", "write_s", "0", "write_s"),
        ("behind", "storage, written behind", copied, "copy_s", "write_s", "write_s"),
        ("partner", "memory of a partner node", copied, "copy_s", "send_s", "send_s"),
    ):
        sheet.fill("tier pause", key=key, name=name, pause=_PAUSES[after_failure].format(load=load))
        away_s = 0.0 if away == "0" else sheet[away]
        recovery = Recovery(
            sheet["mttf_s"],
            sheet[stall],
            sheet[f"restart_{key}_s"],
            least_interval_s=max(away_s, sheet["step_s"]),
            delay_s=away_s,
        )
        interval = {f"interval_{key}_s": best_interval_s(recovery)}
        sheet.fill("tier", interval, key=key, name=name, ettr=ettr_formula(key, stall, away))
        interval_s, share = sheet[f"interval_{key}_s"], sheet[f"ettr_{key}"]
        found.append(CheckpointTier(name, key, stall, away, what, recovery, interval_s, share))
    sheet.fill("tiers")
    return found


def ettr_formula(key: str, stall: str, away: str, failures: str = "mttf_s", pause: str = "") -> str:
    """The formula of `failures.ettr` for a way to keep checkpoints, in the sheet's names."""
    return (
        f"interval_{key}_s / ({failures} * exp(({pause or f'restart_{key}_s'} + {away}) / {failures})"
        f" * (exp((interval_{key}_s + {stall}) / {failures}) - 1))"
    )


def gains(tier: CheckpointTier, sheet: Sheet) -> list[str]:
    """Figures of what one change would add to the goodput, largest first."""
    key, stall, away = tier.key, tier.stall, tier.away
    rarer, free = ettr_formula(key, stall, away, "(2 * mttf_s)"), ettr_formula(key, "0", away)
    sheet.fill("gains", key=key, rarer=rarer, free=free)
    return sorted(groups()["gains"], key=lambda name: sheet[name], reverse=True)


def sweep_intervals(tier: CheckpointTier, spares: Spares, seed: int) -> tuple[SweepPoint, ...]:
    """By formula and simulated, for intervals around the best by formula."""
    return tuple(
        SweepPoint(
            interval_s,
            ettr(tier.recovery, interval_s),
            simulate(tier.recovery, interval_s, spares, _DAYS, _RUNS, seed),
        )
        for interval_s in _intervals_s(tier)
    )


def _intervals_s(tier: CheckpointTier) -> list[float]:
    """Around the best by formula, as far as checkpoints can follow one another."""
    around = (0.125, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
    return [
        tier.interval_s * factor
        for factor in around
        if factor == 1 or tier.interval_s * factor >= tier.recovery.least_interval_s
    ]


# What happens after a failure, three ways: restart the job, bring in a hot spare, or let one replica fall behind.
# The cluster planner compares them.
#
#     restart     everybody stops, the job is placed again, sets up all communication and loads the last checkpoint
#     hot spare   everybody stops; a spare that runs already takes the failed node's place, and only the groups it
#                 is in are set up again, with the checkpoint from its partner's memory
#     no rollback only the data-parallel replica with the failed node stops; the others drop it from their
#                 all-reduce, repeat the step and train on, and take it back when it has caught up (Meta's
#                 fault-tolerant HSDP)
@dataclass(frozen=True, slots=True)
class RecoveryChoice:
    """The sheet has its pause, ETTR, goodput and best job size under `key`."""

    key: str
    name: str
    what: str
    waits: str  # the figure of what is uncertain about its pause


CHOICES = (
    RecoveryChoice("restart", "restart the job", "all GPUs stop", "detect"),
    RecoveryChoice("spare", "hot spare", "all GPUs stop, a running spare takes over", "swap"),
    RecoveryChoice("replica", "no global rollback", "one replica stops, the others repeat a step", "regroup"),
)


def compare_recoveries(sheet: Sheet, tier: CheckpointTier, replicas: int) -> None:
    """By formula, at the size of this job, with the interval between checkpoints of the expected failure rate."""

    def formula(key: str, failures: str = "mttf_s", end: str = "") -> str:
        pause = f"pause_{key}_s{end}"
        if key != "replica":
            return ettr_formula(tier.key, tier.stall, tier.away, failures, pause)
        # All wait for the pause; by Little's law so many replicas are away at once.
        away = f"(pause_restart_s{end} / ({failures} * replicas))"
        return f"exp(0 - {pause} / {failures}) * (1 - min(1, {away}))"

    words = {one.key: formula(one.key) for one in CHOICES}
    sheet.fill("recoveries", {"replicas": replicas}, **words)
    for one in CHOICES:
        for side, opposite, sign, share in (
            ("low", "high", "0 - ", "(detect_range - 1)"),
            ("high", "low", "", "(1 / detect_range - 1)"),
        ):
            sheet.fill(
                "recovery end",
                key=one.key,
                name=one.name,
                side=side,
                opposite=opposite,
                sign=sign,
                wait=f"{one.waits} * {share}",
                at_mttf=formula(one.key, f"mttf_s_{side}"),
                at_pause=formula(one.key, end=f"_{opposite}"),
            )


def best_job_gpus(assumed: Sheet, gpus_per_node: int, load_s: float = 3.0) -> int:
    """GPUs of the job that trains most when a failure restarts all of it: g × ETTR(g) has its top where
    1 = 2·a·g²/c + d·g/c, with g²·a/c from setting up communication and g·d/c from the rest of a restart; c is the
    mean time to failure of one GPU. First order of Daly's equation 20; a step's length hardly matters there."""
    per_node_day = assumed["failures"] / 1000 * gpus_per_node / 8
    c = 86400 * gpus_per_node / per_node_day
    a = assumed["initialise"] / 96000
    d = assumed["detect"] + load_s
    if a == 0:
        return int(c / d) if d else 1 << 40
    return int((math.sqrt(d * d + 8 * a * c) - d) / (4 * a))
