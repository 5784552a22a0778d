"""How the verbs about jobs show them: the table, what a job prints, and the verdict of a replay."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from cumulo.base.quantities import quantity
from cumulo.base.report import Row, grid
from cumulo.cli.shared.terminal import note, present, unwrapped
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decision_log import replay
from cumulo.cluster.drivers.command import output_file
from cumulo.cluster.job_progress import JobProgress
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.cluster.launching import progress_of, refreshed

_POLL_S, _DAY_S = 0.3, 86_400.0


def failed_lately(record: JobRecord) -> bool:
    return record.state == "failed" and time.time() - (record.phases[-1].end_s or 0) < _DAY_S


def print_jobs(records: Sequence[JobRecord], known: Sequence[JobRecord], json_file: Path | None) -> None:
    """`known`: all that there are, of which `records` are shown."""
    shown: list[Any] = [_table(records)] if records else []
    if not any(not one.ended for one in known):
        counts = Counter(one.state for one in known)
        ended = ", ".join(f"{count} {state}" for state, count in counts.items())
        left = ". `cumulo jobs --all` shows all of them" if len(records) < len(known) else ""
        told = f"No job is waiting or running; ended: {ended}{left}."
        shown.append(unwrapped(told if known else "No jobs yet; `cumulo launch JOB.yaml` submits one."))
    shown += [unwrapped(f"{one.job_id} ({one.state}): {one.reason}", "dim") for one in records if one.reason]
    present([], json_file, *shown, jobs=[_plain(record) for record in records])


def _table(records: Sequence[JobRecord]) -> Table:
    lines = []
    for record in records:
        progress = progress_of(record)
        devices = " + ".join(f"{group.count} {group.kind}" for group in record.job.devices)
        lines.append((
            record.job_id, record.target, record.state, devices, where(record),
            record.url or done_text(progress), *speed_texts(progress),
        ))  # fmt: skip
    headings = ("job", "on", "state", "devices", "where", "progress", "step", "predicted")
    return grid(headings, lines, left=range(8))


def where(record: JobRecord) -> str:
    """`n1 ×2, n2`: how many tasks on which nodes."""
    counts: dict[str, int] = {}
    for place in record.places:
        counts[place.node] = counts.get(place.node, 0) + 1
    return ", ".join(node if count == 1 else f"{node} ×{count}" for node, count in counts.items()) or "–"


def done_text(progress: JobProgress | None) -> str:
    if progress is None or progress.steps is None:
        return "–"
    loss = "" if progress.loss is None else f", loss {progress.loss:.3f}"
    return f"step {progress.step} of {progress.steps}{loss}"


def speed_texts(progress: JobProgress | None) -> tuple[str, str]:
    """The time of a step, as measured and as predicted."""
    if progress is None:
        return "–", "–"
    return "–" if progress.step_s is None else quantity(progress.step_s, "s"), progress.predicted_text


def _plain(record: JobRecord) -> dict[str, object]:
    progress, names = progress_of(record), ("step", "steps", "step_s", "predicted_step_s")
    told = ("state", "reason", "handle", "attempt", "failures", "url")
    return {
        **{name: getattr(record, name) for name in told},
        **{name: getattr(progress, name, None) for name in names},
        "job": record.job_id,
        "on": record.target,
        "tenant": record.job.tenant,
        "places": [[place.node, list(place.gpus)] for place in record.places],
        "phases": [[one.state, one.begin_s, one.end_s] for one in record.phases],
    }


def print_output(record: JobRecord) -> None:
    path = output_file(record)
    if not path.exists():
        note(f"{record.job_id} has printed nothing yet: it is {record.state}. {record.reason}")
        return
    sys.stdout.write(path.read_text("utf-8", "replace"))


def follow(store: JobStore, job_id: str, show_output: bool) -> bool:
    """Until the job ends: what it prints, or nothing. Whether it ended well."""
    stream: TextIO | None = None
    while True:
        records, _ = refreshed(store)
        record = next(one for one in records if one.job_id == job_id)
        if show_output:
            if stream is None and output_file(record).exists():
                stream = output_file(record).open(encoding="utf-8", errors="replace")
            if stream is not None:
                sys.stdout.write(stream.read())
                sys.stdout.flush()
        if record.ended:
            note(f"{job_id} is {record.state}: {record.reason}")
            return record.state == "done"
        time.sleep(_POLL_S)


def print_replay(store: JobStore, json_file: Path | None) -> bool:
    turns, differing = replay(store.decisions, lambda name: policy_named(name).decide)
    row = Row(
        "decisions that differ", len(differing), "turns", "lower", must=0, note=f"of {turns} recorded turns"
    )
    present([row], json_file, f"{turns} turns replayed, {len(differing)} differ", *differing[:10])
    return not differing
