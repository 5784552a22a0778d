"""JobHistory: the attempts of a job, when and why each ended, who failed first, which steps had to be repeated, and
what that cost in GPU time. `cumulo jobs show` and the console show it.

Where the target starts attempts by itself (Slurm, Ray), the job writes them into its folder in the store; elsewhere
they are the phases in the store's log. What was repeated, and restarts within an attempt, the run itself notes.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cumulo.base.quantities import quantity
from cumulo.cluster.drivers.command import ATTEMPTS, failed_first_in, run_folder
from cumulo.cluster.job_store import JobPhase, JobRecord
from cumulo.train.run.log import read_log, read_starts

_RUNS = ("running", "stopping")
_SILENT = "it could not say why: its node was lost"


@dataclass(frozen=True, slots=True)
class JobAttempt:
    name: str  # "2"; "2.1" for the first start of the ranks within it, where there are several
    begin_s: float
    devices: int
    nodes: str
    end_s: float | None = None  # None: it runs
    cause: str = ""  # why it ended
    failed_first: str = ""  # a rank or a node; "": nobody did, or nobody knows
    first_step: int | None = None  # steps that were done when it began; None: it did not get so far
    steps_repeated: int = 0  # steps that it did and a later attempt did again
    lost_device_s: float = 0.0  # time of its devices that went into no step that counts

    @property
    def device_s(self) -> float:
        return self.devices * ((time.time() if self.end_s is None else self.end_s) - self.begin_s)


@dataclass(frozen=True, slots=True)
class JobHistory:
    attempts: tuple[JobAttempt, ...]
    unit: str  # what its devices are: GPU or core

    @property
    def device_hours(self) -> float:
        return sum(one.device_s for one in self.attempts) / 3600

    @property
    def lost_device_hours(self) -> float:
        return sum(one.lost_device_s for one in self.attempts) / 3600

    @property
    def steps_repeated(self) -> int:
        return sum(one.steps_repeated for one in self.attempts)

    def __str__(self) -> str:
        count, hours, lost = len(self.attempts), self.device_hours, self.lost_device_hours
        steps = f"{self.steps_repeated} step{'' if self.steps_repeated == 1 else 's'} repeated"
        spent = f"{hours:.3g} {self.unit} hours used, {lost:.3g} of them in no step that counts"
        return f"{count} attempt{'' if count == 1 else 's'}, {steps}; {spent}"


# Of the tables of attempts: each column, and what it is.
ATTEMPT_COLUMNS = (
    ("attempt", "Starts of the job; 2.1 is the first start of the ranks within attempt 2."),
    ("nodes", "Where it ran."),
    ("began", "When it began."),
    ("ran", "How long it ran."),
    ("after step", "Steps that were done when it began."),
    ("repeated", "Steps that it did and a later attempt did again, because no checkpoint had them."),
    ("hours lost", "GPU hours, or core hours, that went into no step that counts."),
    ("failed first", "The rank or the node that failed first."),
)


def attempt_cells(one: JobAttempt) -> tuple[str, ...]:
    return (
        one.name, one.nodes, datetime.fromtimestamp(one.begin_s).strftime("%m-%d %H:%M:%S"),
        quantity(one.device_s / max(1, one.devices), "s"), "–" if one.first_step is None else f"{one.first_step:,}",
        f"{one.steps_repeated:,}", f"{one.lost_device_s / 3600:.3g}", one.failed_first or "–",
    )  # fmt: skip


def job_history(record: JobRecord) -> JobHistory:
    attempts, run = job_attempts(record), run_folder(record)
    if record.job.train is not None:
        attempts = _with_steps(attempts, read_starts(run), run)
    unit = "core" if all(group.on_cpu for group in record.job.devices) else "GPU"
    return JobHistory(tuple(attempts), unit)


def job_attempts(record: JobRecord) -> list[JobAttempt]:
    """Without their steps, for which the run's whole log must be read."""
    attempts = _noted(record) or _seen(record)
    if attempts and attempts[-1].end_s is None and record.state not in _RUNS:
        ends_s = [phase.end_s for phase in record.phases if phase.state in _RUNS and phase.end_s is not None]
        end_s = max([attempts[-1].begin_s, *ends_s[-1:]])
        attempts[-1] = replace(attempts[-1], end_s=end_s, cause=record.reason if record.ended else _SILENT)
    notes = read_starts(run_folder(record))
    parts = [part for one in attempts for part in _split(one, notes)]
    return [replace(one, failed_first=one.failed_first or failed_first_in(one.cause)) for one in parts]


def _noted(record: JobRecord) -> list[JobAttempt]:
    """Attempts that the job wrote down. One whose node was lost did not write down its end."""
    path, found = Path(record.folder, ATTEMPTS), list[JobAttempt]()
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        facts = json.loads(line)
        open_one = bool(found) and found[-1].end_s is None
        if "begin_s" in facts:
            if open_one:
                found[-1] = replace(found[-1], end_s=facts["begin_s"], cause=_SILENT)
            found.append(JobAttempt(str(len(found) + 1), **facts))
        elif open_one:
            found[-1] = replace(found[-1], **facts)
    return found


def _seen(record: JobRecord) -> list[JobAttempt]:
    """Attempts in the log of the store: stretches in which the job ran, or was stopping."""
    found, before = list[JobAttempt](), False
    for phase in record.phases:
        if phase.state in _RUNS and not before:
            found.append(_begun(record, phase, len(found) + 1))
        if phase.state in _RUNS:
            found[-1] = replace(found[-1], end_s=phase.end_s, cause=phase.ended_by)
        before = phase.state in _RUNS
    return found


def _begun(record: JobRecord, phase: JobPhase, number: int) -> JobAttempt:
    devices = len(phase.places) * record.job.devices[0].each or record.job.ranks
    nodes = ", ".join(dict.fromkeys(place.node for place in phase.places))
    return JobAttempt(str(number), phase.begin_s, devices, nodes)


def _within(one: JobAttempt, notes: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    end_s = float("inf") if one.end_s is None else one.end_s
    return [note for note in notes if name in note and one.begin_s <= note["time_s"] < end_s]


def _split(one: JobAttempt, notes: list[dict[str, Any]]) -> Iterator[JobAttempt]:
    """One for each start of the ranks: `cumulo train` starts them again itself, on one machine."""
    begin_s, ends = one.begin_s, _within(one, notes, "why")
    for number, note in enumerate(ends, 1):
        end_s, why = note["time_s"], note["why"]
        yield replace(
            one, name=f"{one.name}.{number}", begin_s=begin_s, end_s=end_s, cause=why, failed_first=""
        )
        begin_s = end_s
    yield replace(one, name=f"{one.name}.{len(ends) + 1}" if ends else one.name, begin_s=begin_s)


def _with_steps(attempts: list[JobAttempt], notes: list[dict[str, Any]], run: Path) -> list[JobAttempt]:
    """With what each attempt did: the log of the run has the steps that count, each once."""
    records, until, repeated = read_log(run / "log.csv"), float("inf"), 0
    found = []
    for one in reversed(attempts):
        starts, useful_s, first = _within(one, notes, "step"), 0.0, None
        lost = repeated
        if starts:
            first, repeated = starts[0]["step"], sum(start["repeated"] for start in starts)
            useful_s = sum(record.step_s for record in records if first < record.step <= until)
            until = min(until, first)
        lost_s = max(0.0, one.device_s - one.devices * useful_s)
        found.append(
            replace(one, first_step=first, steps_repeated=lost if starts else 0, lost_device_s=lost_s)
        )
    return found[::-1]
