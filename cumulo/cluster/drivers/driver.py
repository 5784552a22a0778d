"""Driver: what every target can do with a job. `cumulo launch` and `cumulo jobs` know no more of a target."""

from typing import Any, Protocol

from cumulo.cluster.job_record import JobRecord
from cumulo.errors import CumuloError

Facts = dict[str, Any]  # what is new about a job, by the names of JobRecord


class TargetLost(CumuloError):
    """The target does not answer: nothing is known of what it did with the last question. `why` is true of all its
    jobs, `job` of the one that was asked for. `of_job`: others of the target may be known."""

    def __init__(self, why: str, job: str = "", of_job: bool = False) -> None:
        super().__init__(f"{why}; {job}" if job else why)
        self.why, self.of_job = why, of_job


class Driver(Protocol):
    def explain(self, record: JobRecord) -> str:
        """Exactly what would be submitted, for --dry-run."""

    def submit(self, record: JobRecord) -> Facts:
        """Hand the job over, once: a job of this key that the target already has is found, not made again."""

    def look(self, record: JobRecord) -> Facts:
        """Where the job is now."""

    def cancel(self, record: JobRecord) -> Facts: ...
