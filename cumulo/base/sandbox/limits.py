"""What a job in a killable worker may take, and why one was ended. Used by `Worker` and by its process."""

from dataclasses import dataclass
from typing import Literal, get_args

MIB = 1 << 20

# Why the kernel, or the worker itself, ended a job. "lost": the process went away for another reason.
Reason = Literal["cpu time", "time", "memory", "stack", "lost"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one job. The kernel enforces them, so no code in the job can pass over them."""

    cpu_s: float  # processor time
    wall_s: float  # longer than cpu_s: a busy machine is not the job's fault
    memory_bytes: int  # address space beyond what the worker needs by itself
    nice_after_s: float = 0.1  # a job that takes longer than this gives way to everything else on the machine


class JobEnded(Exception):
    """A job went past its limits, or its process died of it. Nothing of it is left running."""

    def __init__(self, reason: Reason, limits: Limits) -> None:
        self.reason, self.limits = reason, limits
        super().__init__(self.words)

    @property
    def words(self) -> str:
        """The reason as the end of a sentence: 'it ...'."""
        return {
            "cpu time": f"it takes more than {self.limits.cpu_s:g} s of processor time",
            "time": f"it takes more than {self.limits.wall_s:g} s",
            "memory": f"it needs more than {self.limits.memory_bytes // MIB:,} MiB of memory",
            "stack": "it is nested too deeply",
            "lost": "the process that worked on it died",
        }[self.reason]


class JobFailed(Exception):
    """The job's own code raised an error that it did not expect: a fault of ours, not of the job's author."""


class WorkerUnavailable(Exception):
    """The worker process could not be started or did not answer: the text says which."""
