"""Driver: what every target can do with a job. `cumulo launch` and `cumulo jobs` know no more of a target."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from cumulo.cluster.job_store import JobRecord
from cumulo.errors import CumuloError

_SUBMITTED = "handed-over"
_PATIENCE_S = 60.0
Facts = dict[str, Any]  # what is new about a job, by the names of JobRecord


class TargetLost(CumuloError):
    """The target does not answer: nothing is known of what it did with the last question. `why` is true of all its
    jobs, `job` of the one that was asked for. `of_job`: others of the target may be known."""

    def __init__(self, why: str, job: str = "", of_job: bool = False) -> None:
        super().__init__(f"{why}; {job}" if job else why)
        self.why, self.of_job = why, of_job


def run_tool(words: Sequence[str], lost: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command of a target. `lost`: what becomes of the job if it does not answer."""
    try:
        return subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TargetLost(f"{words[0]} did not answer within {_PATIENCE_S:.0f} s", lost) from None


def note_submission(record: JobRecord) -> None:
    """Written down before a target is told of a job: from here on it may be there, whatever it answers."""
    Path(record.folder, _SUBMITTED).touch()


def may_be_there(record: JobRecord) -> bool:
    return bool(record.handle) or Path(record.folder, _SUBMITTED).exists()


class Driver(Protocol):
    def explain(self, record: JobRecord) -> str:
        """Exactly what would be submitted, for --dry-run."""

    def submit(self, record: JobRecord) -> Facts:
        """Hand the job over, once: a job of this key that the target already has is found, not made again."""

    def look(self, record: JobRecord) -> Facts:
        """Where the job is now."""

    def cancel(self, record: JobRecord) -> Facts: ...
