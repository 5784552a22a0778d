"""What becomes of a job whose attempt has ended: done, once more, or failed; every driver asks it. And where a gang
goes on after it lost a node: on a spare one, with fewer tasks, or later with as many as before; the cheapest way in
expected time to the end is taken, and the Ray driver and the failure simulator ask it."""

from dataclasses import dataclass
from typing import Literal

RecoveryWay = Literal["spare", "shrink", "wait"]


@dataclass(frozen=True, slots=True)
class LostNode:
    """A gang without one of its nodes."""

    tasks: int  # the gang's full size
    least_tasks: int  # the smallest it may have; `tasks`: it is rigid
    fitting_tasks: int  # tasks for which there is room on nodes that are alive
    left_s: float | None = None  # at full size, to the end; None: unknown
    repair_s: float = 600.0  # until the lost node, or another one, is there again
    restart_s: float = 30.0  # loading a checkpoint and starting the ranks
    ways: tuple[RecoveryWay, ...] = ("spare", "shrink", "wait")


@dataclass(frozen=True, slots=True)
class WayOn:
    way: RecoveryWay
    tasks: int
    cost_s: float  # time to the end, beyond that of an undisturbed run
    reason: str


def recovery(lost: LostNode) -> WayOn:
    """With the same batch, a gang of n of N tasks takes N / n times as long: what is left bounds what a repair
    may take."""
    ways = [_cost(way, lost) for way in lost.ways]
    possible = [way for way in ways if way is not None]
    if not possible:
        return WayOn("wait", lost.tasks, lost.repair_s, "waits for a node: the job file allows no other way")
    return min(possible, key=lambda way: way.cost_s)


def _cost(way: RecoveryWay, lost: LostNode) -> WayOn | None:
    fitting = min(lost.tasks, lost.fitting_tasks)
    if way == "spare":
        if fitting < lost.tasks:
            return None
        return WayOn(
            "spare", lost.tasks, lost.restart_s, "restarts on the nodes that are there: all tasks fit"
        )
    if way == "shrink":
        if not lost.least_tasks <= fitting < lost.tasks:
            return None
        slower_s = (lost.left_s or 0.0) * (lost.tasks / fitting - 1)
        cost_s = lost.restart_s + slower_s
        reason = f"goes on with {fitting} of {lost.tasks} tasks: {slower_s:.0f} s longer, and a repair takes "
        return WayOn("shrink", fitting, cost_s, f"{reason}{lost.repair_s:.0f} s")
    return WayOn(
        "wait",
        lost.tasks,
        lost.repair_s + lost.restart_s,
        f"waits for {lost.tasks - fitting} more tasks' nodes",
    )


REFUSED = 2  # exit code of a command that cannot succeed however often it is tried


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    exit_code: int | None  # None: it was killed, or its node was lost
    finished: bool  # a training run has done all its steps; a service was asked to end
    step: int = 0  # steps done, in all
    first_step: int = 0  # steps that were done before this attempt
    asked: bool = False  # it was asked to save and end: a time limit, a preemption


@dataclass(frozen=True, slots=True)
class AfterAttempt:
    state: Literal["done", "again", "failed"]
    reason: str
    counts: bool = False  # as a failure


def after_attempt(end: AttemptEnd, failures: int, most_restarts: int) -> AfterAttempt:
    """`failures`: attempts that ended badly before this one."""
    code = end.exit_code
    if code == 0 and end.finished:
        return AfterAttempt("done", "finished")
    if end.asked or (code == 0 and end.step > end.first_step):
        return AfterAttempt("again", f"saved a checkpoint after step {end.step} and goes on from there")
    how = "was killed" if code is None else f"ended with exit code {code}"
    if code == REFUSED:
        return AfterAttempt("failed", f"{how}: its log says why", counts=True)
    if code is not None and end.step <= end.first_step:
        return AfterAttempt("failed", f"{how} before its first step: its log says why", counts=True)
    if failures >= most_restarts:
        return AfterAttempt("failed", f"{how}, after {failures} restarts (restart.most)", counts=True)
    return AfterAttempt(
        "again", f"{how} after step {end.step}; restarts from its last checkpoint", counts=True
    )
