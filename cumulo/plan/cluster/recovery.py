"""What happens after a failure, three ways: restart the job, bring in a hot spare, or let one replica fall behind.
The cluster planner compares them.

    restart     everybody stops, the job is placed again, sets up all communication and loads the last checkpoint
    hot spare   everybody stops; a spare that runs already takes the failed node's place, and only the groups it is
                in are set up again, with the checkpoint from its partner's memory
    no rollback only the data-parallel replica with the failed node stops; the others drop it from their all-reduce,
                repeat the step and train on, and take it back when it has caught up (Meta's fault-tolerant HSDP)
"""

import math
from dataclasses import dataclass

from cumulo.plan.cluster.checkpoints import CheckpointTier, ettr_formula
from cumulo.plan.cluster.goal import Assumptions
from cumulo.plan.cluster.sheet import Sheet


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
