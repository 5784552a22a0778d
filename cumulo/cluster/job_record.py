"""JobRecord: what is known of a submitted job, folded from the store's events. Drivers, `cumulo jobs` and the
console read it; only events change it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.job_file import JobFile, job_from

Target = Literal["local", "ray", "slurm", "kubernetes"]
JobState = Literal["submitting", "queued", "running", "stopping", "done", "failed", "cancelled"]
TARGETS: tuple[Target, ...] = get_args(Target)
_PLAIN = ("state", "handle", "reason", "attempt", "failures", "first_step", "url")  # fields that events set
ENDED: tuple[JobState, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class JobPhase:
    """A stretch of a job's life, for the timeline."""

    state: JobState
    begin_s: float
    places: tuple[TaskPlace, ...] = ()
    end_s: float | None = None  # None: it lasts


@dataclass(frozen=True, slots=True)
class JobRecord:
    job_id: str
    key: str  # a second submission with it is the same job
    target: Target
    job: JobFile
    folder: str  # of the job, in the store
    working_folder: str  # where it was launched: relative paths of configurations are meant from there
    submitted_s: float
    state: JobState = "submitting"
    handle: str = ""  # what the target calls the job
    places: tuple[TaskPlace, ...] = ()
    reason: str = ""  # why it waits, runs there, or ended
    attempt: int = 0  # starts so far
    failures: int = 0  # starts that ended badly
    first_step: int = 0  # steps that were done when this attempt began
    url: str = ""  # of a service
    cancel_asked: bool = False
    phases: tuple[JobPhase, ...] = field(default_factory=tuple)

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def folded(events: Iterable[Mapping[str, Any]]) -> dict[str, JobRecord]:
    """All jobs, in the order of submission."""
    jobs: dict[str, JobRecord] = {}
    for event in events:
        name = event["job_id"]
        if event["event"] == "submitted":
            jobs[name] = JobRecord(
                name,
                event["key"],
                event["target"],
                job_from(event["job"], f"job {name} of the store"),
                event["folder"],
                event["working_folder"],
                event["time_s"],
                phases=(JobPhase("submitting", event["time_s"]),),
            )
        elif name in jobs:
            jobs[name] = _changed(jobs[name], event)
    return jobs


def _changed(record: JobRecord, event: Mapping[str, Any]) -> JobRecord:
    if event["event"] == "cancel":
        return replace(record, cancel_asked=True)
    changes = {name: event[name] for name in _PLAIN if name in event}
    if "places" in event:
        changes["places"] = tuple(TaskPlace(node, tuple(gpus)) for node, gpus in event["places"])
    changed = replace(record, **changes)
    if (changed.state, changed.places) == (record.state, record.places):
        return changed
    now_s = event["time_s"]
    last = replace(record.phases[-1], end_s=now_s)
    begun = () if changed.ended else (JobPhase(changed.state, now_s, changed.places),)
    return replace(changed, phases=(*record.phases[:-1], last, *begun))
