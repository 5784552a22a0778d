"""Where checkpoints go and how often: three tiers, each with its best interval. The cluster planner calls it."""

import math
from dataclasses import dataclass

from cumulo.plan.cluster.failures import FailureOutcome, Recovery, Spares, best_interval_s, ettr, simulate
from cumulo.plan.cluster.goal import ClusterGoal
from cumulo.plan.cluster.sheet import Sheet, groups
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.states import optimizer_bytes_each

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
    given = {"state_bytes_each": optimizer_bytes_each(job, 2), "token_bytes": 2 if words <= 65536 else 4}
    sheet.fill("checkpoint", given, vocabulary=f"{words:,}")


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


CHOICES = (
    RecoveryChoice("restart", "restart the job", "all GPUs stop"),
    RecoveryChoice("spare", "hot spare", "all GPUs stop, a running spare takes over"),
    RecoveryChoice("replica", "no global rollback", "one replica stops, the others repeat a step"),
)


def compare_recoveries(sheet: Sheet, tier: CheckpointTier, replicas: int) -> None:
    """By formula, at the size of this job."""
    restart, spare = (
        ettr_formula(tier.key, tier.stall, tier.away, pause=f"pause_{key}_s") for key in ("restart", "spare")
    )
    sheet.fill("recoveries", {"replicas": replicas}, restart=restart, spare=spare)


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
