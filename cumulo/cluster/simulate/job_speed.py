"""A job of a trace, and how fast it runs. The simulator's player asks; traces, elastic jobs and fabrics answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace: what is asked for, and how much work it really is: seconds at speed 1."""

    request: JobRequest
    work: float


class JobSpeed(Protocol):
    """How fast a placed job advances. The default is speed 1 wherever it is placed."""

    refreshes: bool  # whether a policy shall know more about a job while it runs or waits

    def rate(self, job: JobRequest, places: tuple[TaskPlace, ...], done: float) -> tuple[float, float]:
        """Work per second from now on, and the amount of work done at which it may change."""

    def refreshed(self, job: JobRequest, done: float) -> JobRequest:
        """What the policy shall know about this job now: a prediction or a speed table may have changed."""

    def beside(self, running: Mapping[str, RunningJob]) -> None:
        """Called once: the running jobs, kept up to date, for speeds that depend on the neighbours."""


class FixedSpeed:
    refreshes = False

    def beside(self, running: Mapping[str, RunningJob]) -> None:
        pass

    def rate(self, job: JobRequest, places: tuple[TaskPlace, ...], done: float) -> tuple[float, float]:
        return 1.0, float("inf")

    def refreshed(self, job: JobRequest, done: float) -> JobRequest:
        return job
