"""What becomes of a job whose attempt has ended: done, once more, or failed; every driver asks it. And where a gang
goes on after it lost a node: on a spare one, with fewer tasks, or later with as many as before; the cheapest way in
expected time to the end is taken, and the Ray driver asks it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

RecoveryWay = Literal["spare", "shrink", "wait"]


def recovery(
    *,
    tasks: int,
    least_tasks: int,
    fitting_tasks: int,
    left_s: float | None = None,
    repair_s: float = 600.0,
    restart_s: float = 30.0,
    ways: Sequence[RecoveryWay] = ("spare", "shrink", "wait"),
) -> tuple[RecoveryWay, int, str]:
    """How a gang that lost a node goes on: the way, with how many tasks, and why. `least_tasks`: `tasks` for a
    rigid gang; `fitting_tasks`: those for which nodes that are alive have room; `left_s`: to the end at full size,
    if that is known. With the same batch, a gang of n of N tasks takes N / n times as long: what is left bounds
    what a repair may take."""
    fitting = min(tasks, fitting_tasks)
    waits = f"waits for {tasks - fitting} more tasks' nodes"
    found: list[tuple[float, RecoveryWay, int, str]] = []  # with the time beyond that of an undisturbed run
    if "spare" in ways and fitting == tasks:
        found.append((restart_s, "spare", tasks, "restarts on the nodes that are there: all tasks fit"))
    if "shrink" in ways and least_tasks <= fitting < tasks:
        slower_s = (left_s or 0.0) * (tasks / fitting - 1)
        why = f"goes on with {fitting} of {tasks} tasks: {slower_s:.0f} s longer, and a repair takes "
        found.append((restart_s + slower_s, "shrink", fitting, f"{why}{repair_s:.0f} s"))
    if "wait" in ways or not found:
        found.append((repair_s + restart_s, "wait", tasks, waits))
    return min(found)[1:]


REFUSED = 2  # exit code of a command that cannot succeed however often it is tried
SIGNALLED = 128  # a shell adds it to the number of the signal that ended a command
UNHEALTHY = 5  # of a start on a node that failed its check, which cordoned it: nothing of the job has run


def own_exit_code(code: int | None) -> int | None:
    """None: a signal ended it, which Python writes as a negative code."""
    return code if code is not None and 0 <= code <= SIGNALLED else None


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    exit_code: int | None  # None: it was killed, or its node was lost
    finished: bool  # a training run has done all its steps; a service was asked to end
    step: int = 0  # steps done, in all
    first_step: int = 0  # steps that were done before this attempt
    error: str = ""  # the last error that it printed


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
    if code == 0 and end.step > end.first_step:  # it was asked to save and end
        return AfterAttempt("again", f"saved a checkpoint after step {end.step} and goes on from there")
    how, why = (
        "was killed" if code is None else f"ended with exit code {code}",
        end.error or "its log says why",
    )
    if code == UNHEALTHY and failures < most_restarts:
        return AfterAttempt("again", "a node failed its check before the start; it goes to another one", True)
    if code == REFUSED:
        return AfterAttempt("failed", f"{how}: {why}", counts=True)
    if code and end.step <= end.first_step:  # 0: it was asked to end while it started
        return AfterAttempt("failed", f"{how} before its first step: {why}", counts=True)
    if failures >= most_restarts:
        return AfterAttempt("failed", f"{how}, after {failures} restarts (restart.most): {why}", counts=True)
    told = f" ({end.error})" if end.error else ""
    return AfterAttempt(
        "again", f"{how} after step {end.step}{told}; restarts from its last checkpoint", counts=True
    )
