"""Where checkpoints go and how often: three tiers, each with its best interval. The cluster planner calls it."""

import math
from dataclasses import dataclass

from cumulo.plan.cluster.failures import FailureOutcome, Recovery, Spares, best_interval_s, ettr, simulate
from cumulo.plan.cluster.goal import Assumptions, ClusterGoal
from cumulo.plan.cluster.sheet import Sheet
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
    sheet.given(
        "state_bytes_each",
        optimizer_bytes_each(job, 2),
        "bytes",
        "kept of a parameter in a checkpoint",
        "its float32 copy and two moments; what computes is made from them",
    )
    sheet.work_out("checkpoint_bytes", "parameters * state_bytes_each", "bytes", "checkpoint size")
    sheet.work_out("shard_bytes", "checkpoint_bytes / job_gpus", "bytes", "checkpoint size per GPU")
    sheet.work_out("copy_s", "shard_bytes / host_bytes_per_s", "s", "copying a checkpoint to host memory")
    sheet.work_out("write_s", "checkpoint_bytes / (storage * 1e9)", "s", "writing a checkpoint to storage")
    sheet.work_out("send_s", "shard_bytes / nic_bytes_per_s", "s", "sending a GPU's part to another node")
    sheet.work_out(
        "mttf_s", "86400 / (job_nodes * failures_per_node_day)", "s", "mean time to failure of the job"
    )
    sheet.work_out("mttf_h", "mttf_s / 3600", "h", "mean time to failure of the job")
    sheet.work_out(
        "write_for_stall",
        "checkpoint_bytes / (2 * mttf_s * stall ** 2) / 1e9",
        "GB/s",
        "storage that keeps stalls within their share, if training stops while it writes",
        "C/τ ≤ share with Young's τ = √(2CM)",
    )
    token_bytes = 2 if goal.model.vocab_size <= 65536 else 4
    sheet.given(
        "token_bytes", token_bytes, "bytes", "a token on disk", f"vocabulary of {goal.model.vocab_size:,}"
    )
    sheet.work_out("read_bytes_per_s", "training_tok_s * token_bytes", "bytes/s", "data reading rate")


# From a failure until training continues, in the sheet's names, by what happens then: plan/cluster/recovery.py.
_PAUSES = {
    "restart": "detect + initialise_s + {load}",
    "spare": "swap + {load}",
    "replica": "regroup + step_s",
}


def checkpoint_tiers(sheet: Sheet, after_failure: str = "restart") -> list[CheckpointTier]:
    sheet.work_out(
        "initialise_s", "initialise * job_gpus / 96000", "s", "setting up communication of this job"
    )
    restart = _PAUSES[after_failure]
    found = []
    copied = "while parts are copied to host memory"
    for key, name, what, stall, away, load in (
        ("written", "storage, training stops", "until all is written", "write_s", "0", "write_s"),
        ("behind", "storage, written behind", copied, "copy_s", "write_s", "write_s"),
        ("partner", "memory of a partner node", copied, "copy_s", "send_s", "send_s"),
    ):
        restart_s = sheet.work_out(
            f"restart_{key}_s", restart.format(load=load), "s", f"from failure to training: {name}"
        )
        away_s = 0.0 if away == "0" else sheet[away]
        recovery = Recovery(
            sheet["mttf_s"],
            sheet[stall],
            restart_s,
            least_interval_s=max(away_s, sheet["step_s"]),
            delay_s=away_s,
        )
        interval_s = sheet.given(
            f"interval_{key}_s",
            best_interval_s(recovery),
            "s",
            f"best interval: {name}",
            "Daly 2006, equation 37: √(2CM)·(1 + √(C/2M)/3 + C/18M) − C; no shorter than a step, nor than a "
            "checkpoint takes to be away",
        )
        share = sheet.work_out(
            f"ettr_{key}",
            ettr_formula(key, stall, away),
            "share",
            f"share of time that trains: {name}",
            "Daly 2006, equation 20",
        )
        found.append(CheckpointTier(name, key, stall, away, what, recovery, interval_s, share))
    sheet.work_out(
        "both_lost_share",
        "failures_per_node_day / 86400 * restart_partner_s",
        "share",
        "failures in which the partner fails as well, before the job is back",
    )
    return found


def ettr_formula(key: str, stall: str, away: str, failures: str = "mttf_s", pause: str = "") -> str:
    """Of a tier, in the sheet's names: `cluster_failures.ettr`."""
    return (
        f"interval_{key}_s / ({failures} * exp(({pause or f'restart_{key}_s'} + {away}) / {failures})"
        f" * (exp((interval_{key}_s + {stall}) / {failures}) - 1))"
    )


def gains(tier: CheckpointTier, sheet: Sheet) -> list[str]:
    """Figures of what one change would add to the goodput, largest first."""
    key, stall, away = tier.key, tier.stall, tier.away
    better = {
        "gain_failures": ("half the failures", ettr_formula(key, stall, away, "(2 * mttf_s)")),
        "gain_restart": (
            "half the time from failure to training",
            f"ettr_{key} * exp(restart_{key}_s / 2 / mttf_s)",
        ),
        "gain_checkpoint": ("checkpoints that stop nothing", ettr_formula(key, "0", away)),
    }
    for name, (change, formula) in better.items():
        sheet.work_out(name, f"{formula} / ettr_{key} - 1", "share", change, "Daly 2006, equation 20")
    return sorted(better, key=lambda name: sheet[name], reverse=True)


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


def compare_recoveries(sheet: Sheet, tier: CheckpointTier, replicas: int) -> tuple[RecoveryChoice, ...]:
    """By formula, at the size of this job and at the size that would give each the most goodput."""
    sheet.given("replicas", replicas, "replicas", "data-parallel replicas of the job", "layout")
    for key, pause in (
        ("restart", "detect + initialise_s + send_s"),
        ("spare", "swap + send_s"),
        ("replica", "regroup + step_s"),
    ):
        name = next(one.name for one in CHOICES if one.key == key)
        sheet.work_out(f"pause_{key}_s", pause, "s", f"pause after a failure: {name}")
        if key != "replica":
            formula = ettr_formula(tier.key, tier.stall, tier.away, pause=f"pause_{key}_s")
            sheet.work_out(f"ettr_{key}", formula, "share", f"ETTR: {name}", "Daly 2006, equation 20")
    sheet.work_out(
        "ettr_replica",
        "exp(0 - pause_replica_s / mttf_s) * (1 - min(1, pause_restart_s / (mttf_s * replicas)))",
        "share",
        "ETTR: no global rollback",
        "all wait for the pause; by Little's law so many replicas are away at once",
    )
    for one in CHOICES:
        label = f"goodput at this size: {one.name}"
        sheet.work_out(f"goodput_{one.key}", f"training_tok_s * ettr_{one.key}", "tokens/s", label)
    return CHOICES


def best_job_gpus(assumed: Assumptions, gpus_per_node: int, load_s: float = 3.0) -> int:
    """GPUs of the job that trains most when a failure restarts all of it: g × ETTR(g) has its top where
    1 = 2·a·g²/c + d·g/c, with g²·a/c from setting up communication and g·d/c from the rest of a restart; c is the
    mean time to failure of one GPU. First order of Daly's equation 20; a step's length hardly matters there."""
    per_node_day = assumed.failures.value / 1000 * gpus_per_node / 8
    c = 86400 * gpus_per_node / per_node_day
    a = assumed.initialise.value / 96000
    d = assumed.detect.value + load_s
    if a == 0:
        return int(c / d) if d else 1 << 40
    return int((math.sqrt(d * d + 8 * a * c) - d) / (4 * a))
