"""Where a gang goes on after it lost a node: on a spare one, with fewer tasks, or later with as many as before.
The cheapest way in expected time to the end is taken. Pure; the Ray driver and the failure simulator ask it."""

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
