"""JobStore: every job that was launched by this user, in a folder, as an append-only log of events. Commands, the
local supervisor, the drivers and the console share it; a lock file keeps their lines apart.

    store = JobStore(default_store())
    record, is_new = store.submit(job, "local", key=None)
    store.jobs()["tiny-1"].state        # "queued"

A submission has a key. While a job with this key has not ended, submitting again returns it instead of a second
one; a key that was given by hand names one job for ever.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.job_file import JobFile, job_from, plain_job
from cumulo.errors import ConfigError

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
    ended_by: str = ""  # why it ended


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


def folded(events: Iterable[Mapping[str, Any]], known: Mapping[str, JobRecord]) -> dict[str, JobRecord]:
    """All jobs, in the order of submission. `known`: as they were before these events."""
    jobs = dict(known)
    for event in events:
        name = event["job_id"]
        if event["event"] == "submitted":
            jobs[name] = JobRecord(
                name,
                event["key"],
                event["target"],
                job_from(event["job"], f"job {name} of the store", checked=False),
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
    last = replace(record.phases[-1], end_s=now_s, ended_by=changed.reason)
    begun = () if changed.ended else (JobPhase(changed.state, now_s, changed.places),)
    return replace(changed, phases=(*record.phases[:-1], last, *begun))


def default_store() -> Path:
    """The store in the user's state directory, as the XDG specification names it."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "cumulo" / "jobs"


@dataclass(frozen=True, slots=True)
class _Known:
    """The log as it was read last, and its jobs."""

    size: int = 0
    lines: bytes = b""
    jobs: Mapping[str, JobRecord] = field(default_factory=dict)


class JobStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot keep jobs in {folder}: {error.strerror}; choose another --store"
            ) from error
        self.log = self.folder / "log.jsonl"
        self.decisions = self.folder / "decisions.jsonl"
        self._known = _Known()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else appends meanwhile."""
        with (self.folder / "log.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def handing_over(self, record: JobRecord, wait: bool) -> Iterator[bool]:
        """Whether nobody else hands this job to its target meanwhile."""
        folder = self.folder / record.job_id
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "submit.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    def events(self) -> list[dict[str, Any]]:
        return self._events(self._lines())

    def _lines(self) -> bytes:
        """A last line that a crash cut short does not count."""
        content = self.log.read_bytes() if self.log.exists() else b""
        return content[: content.rfind(b"\n") + 1]

    def _events(self, lines: bytes, first: int = 1) -> list[dict[str, Any]]:
        texts = lines.decode("utf-8", errors="replace").splitlines()
        return [self._event(number, text) for number, text in enumerate(texts, first)]

    def _event(self, number: int, line: str) -> dict[str, Any]:
        try:
            event = json.loads(line)
            if {"event", "job_id", "time_s"} <= event.keys():
                return dict(event)
        except (ValueError, AttributeError):
            pass
        raise ConfigError(
            f"{self.log}:{number} is not an event of a job, so somebody else wrote into it: {line[:60]!r}; "
            "remove that line, or choose another --store"
        )

    def jobs(self) -> dict[str, JobRecord]:
        """Only what was appended since the last time is worked out."""
        size = self.log.stat().st_size if self.log.exists() else 0
        known = self._known
        if size != known.size:
            lines = self._lines()
            known = known if lines.startswith(known.lines) else _Known()
            new = self._events(lines[len(known.lines) :], 1 + known.lines.count(b"\n"))
            self._known = known = _Known(size, lines, folded(new, known.jobs))
        return dict(known.jobs)

    def find(self, name: str) -> JobRecord:
        """The job of that id; the name of a job file means the last job of that name."""
        jobs = self.jobs()
        if name in jobs:
            return jobs[name]
        if same := [record for record in jobs.values() if record.job.name == name]:
            return same[-1]
        known = ", ".join(list(jobs)[-8:]) or "none yet"
        raise ConfigError(f"there is no job {name!r} in {self.folder}; the last jobs: {known}")

    def submit(self, job: JobFile, target: Target, key: str | None = None) -> tuple[JobRecord, bool]:
        """The job of this key, and whether it is new."""
        used = key or _content_key(job, target)
        with self.locked():
            jobs = self.jobs()
            same = [record for record in jobs.values() if record.key == used]
            withdrawn = bool(same) and same[-1].state == "submitting" and same[-1].cancel_asked
            if same and (key is not None or not (same[-1].ended or withdrawn)):
                return same[-1], False
            number = 1 + max((_number(name, job.name) for name in jobs), default=0)
            name = f"{job.name}-{number}"
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "job.yaml").write_text(yaml.safe_dump(plain_job(job), sort_keys=False), "utf-8")
            self._append(
                "submitted", name, key=used, target=target, job=plain_job(job), folder=str(folder),
                working_folder=str(Path.cwd()),
            )  # fmt: skip
            return self.jobs()[name], True

    def append(self, event: str, job_id: str, **facts: Any) -> None:
        with self.locked():
            self._append(event, job_id, **facts)

    def change(self, record: JobRecord, **facts: Any) -> None:
        """Write down what is new about a job; nothing where nothing is."""
        with self.locked():
            current = self.jobs()[record.job_id]
            if "places" in facts:
                facts["places"] = [[place.node, list(place.gpus)] for place in facts["places"]]
            before = {name: _plain(getattr(current, name)) for name in facts}
            if before != facts:
                self._append("changed", record.job_id, **facts)

    def _append(self, event: str, job_id: str, **facts: Any) -> None:
        line = json.dumps({"time_s": round(time.time(), 3), "event": event, "job_id": job_id, **facts})
        self._mend()
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _mend(self) -> None:
        """Cut off the rest of a line that a crash left behind, so that the next line begins one."""
        if self.log.exists() and not (content := self.log.read_bytes()).endswith(b"\n") and content:
            with self.log.open("r+b") as stream:
                stream.truncate(content.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    return [[place.node, list(place.gpus)] for place in value] if isinstance(value, tuple) else value


def _content_key(job: JobFile, target: Target) -> str:
    content = json.dumps([plain_job(job), target], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _number(job_id: str, name: str) -> int:
    head, _, tail = job_id.rpartition("-")
    return int(tail) if head == name and tail.isdecimal() else 0
