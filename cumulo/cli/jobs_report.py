"""How the verbs about jobs show them: the table, what a job prints, and the verdict of a replay."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from cumulo.base.quantities import quantity
from cumulo.base.report import Row, grid
from cumulo.cli.shared.terminal import note, present, unwrapped
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decision_log import replay
from cumulo.cluster.drivers.command import output_file
from cumulo.cluster.job_history import ATTEMPT_COLUMNS, attempt_cells, job_attempts, job_history
from cumulo.cluster.job_progress import JobProgress
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.cluster.launching import progress_of, refreshed
from cumulo.cluster.node_health import NodeHealth

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
    shown += [
        unwrapped(f"{one.job_id} ({one.state}): {one.reason}{_restarts(one)}", "dim")
        for one in records
        if one.reason
    ]
    present([], json_file, *shown, jobs=[_plain(record) for record in records])


def _restarts(record: JobRecord) -> str:
    times = len(job_attempts(record)) - 1
    if times < 1:
        return ""
    return f"; {times} restart{'' if times == 1 else 's'}: `cumulo jobs show {record.job_id}` says why"


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


def print_history(record: JobRecord, json_file: Path | None) -> None:
    """Every attempt of a job, and what they come to."""
    history = job_history(record)
    unit = f"{history.unit} hours"
    rows = [
        Row("attempts", len(history.attempts), "", "lower"),
        Row("steps repeated", history.steps_repeated, "", "lower"),
        Row(f"{unit} used", history.device_hours, "h", "lower"),
        Row(f"{unit} lost", history.lost_device_hours, "h", "lower", note="in no step that counts"),
    ]
    shown: list[Any] = [unwrapped(f"{record.job_id} on {record.target}: {record.state}, {record.reason}")]
    if history.attempts:
        shown.append(
            grid([name for name, _ in ATTEMPT_COLUMNS], map(attempt_cells, history.attempts), left=(0, 1))
        )
    shown += [unwrapped(f"{one.name}: {one.cause}", "dim") for one in history.attempts if one.cause]
    attempts = [asdict(one) for one in history.attempts]
    present(rows, json_file, *shown, unwrapped(str(history)), job=record.job_id, attempts=attempts)


def print_nodes(store: JobStore, json_file: Path | None) -> None:
    """Nodes of which something was heard: what became of them and why, or what brought them back."""
    states = [one for one in NodeHealth(store).states().values() if one.act != "ignore" or one.back]
    times = [time.strftime("%F %T", time.localtime(one.since_s or one.back_s)) for one in states]
    lines = [(one.node, one.shown, one.kind or "–", at) for one, at in zip(states, times, strict=True)]
    shown: list[Any] = [grid(("node", "state", "signal", "since"), lines, left=range(4))] if states else []
    shown += [unwrapped(f"{one.node}: {one.reason or one.back}", "dim") for one in states]
    told = [{**asdict(one), "state": one.shown} for one in states]
    present([], json_file, *(shown or ["No node was cordoned."]), nodes=told)


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
