"""What becomes of a job whose attempt has ended: done, once more, or failed. Every driver asks it."""

from dataclasses import dataclass
from typing import Literal

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
