"""The page Jobs of the console: what `cumulo jobs` shows, as it changes. Jobs are those of the user who runs the
server; only visitors who may operate the server see and cancel them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from zlib import crc32

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.base.quantities import quantity
from cumulo.cluster.drivers.command import output_file, output_tail
from cumulo.cluster.drivers.local import this_machine
from cumulo.cluster.job_history import ATTEMPT_COLUMNS, JobHistory, attempt_cells, job_history
from cumulo.cluster.job_progress import JobProgress
from cumulo.cluster.job_store import JobRecord, JobState, JobStore, Target, default_store
from cumulo.cluster.launching import cancel, progress_of, refreshed
from cumulo.cluster.node_health import NodeHealth, NodeState
from cumulo.console.front import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.console.values import actions, heading, table, tile

_REFRESH_S = 2.0
_SHOWN = 40
_LOG_CHARACTERS = 20_000
_ASKED: tuple[Target, ...] = ("local", "slurm")  # Ray is not: a server need not join a cluster to show a page


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/jobs", title="Jobs · Cumulo")
    def jobs(request: Request) -> None:
        with shell.page(request, "/jobs") as visitor:
            if not visitor.may_operate:
                show(
                    empty("Jobs are shown to operators", "Log in with an operator's key to see them."), "card"
                )
                return
            page = _JobsPage(shell, visitor)
            shell.clock(visitor, _REFRESH_S, page.tick)


class _JobsPage:
    def __init__(self, shell: Shell, visitor: Visitor) -> None:
        self._shell, self._visitor = shell, visitor
        self._tiles = show("", "tiles four")
        self._queue, self._map, self._timeline = show("", "card"), show("", "card"), show("", "card")
        with ui.dialog() as self._dialog, ui.card().classes("dialog job-log"):
            self._log = show("")
        self._shown_job = ""
        ui.on("job", lambda event: self._act(*map(str, event.args)))

    async def tick(self) -> None:
        records, progress, slots, closed = await asyncio.to_thread(_look)
        self._tiles.set_content(job_tiles_html(records))
        newest = records[::-1][:_SHOWN]
        self._queue.set_content(queue_html(newest, progress, self._visitor.may_operate))
        self._map.set_content(map_html([one for one in records if not one.ended], slots, closed))
        self._timeline.set_content(timeline_html(newest, time.time()))
        if self._dialog.value:
            shown = [one for one in records if one.job_id == self._shown_job]
            texts = [await asyncio.to_thread(log_html, one) for one in shown]
            self._log.set_content("".join(texts))

    async def _act(self, what: str, job_id: str) -> None:
        if what == "cancel":
            await self._cancel(job_id)
        elif self._shell.sessions.still_valid(self._visitor):
            self._shown_job = job_id
            self._dialog.open()
            await self.tick()

    async def _cancel(self, job_id: str) -> None:
        async def act() -> str:
            await asyncio.to_thread(cancel, JobStore(default_store()), job_id)
            return f"{job_id} is asked to end"

        await self._shell.operate(self._visitor, act)
        await self.tick()


def _look() -> tuple[list[JobRecord], dict[str, JobProgress | None], dict[str, int], list[NodeState]]:
    store = JobStore(default_store())
    records, _ = refreshed(store, _ASKED)
    machine = this_machine(store)[0]
    slots = {machine.name: max(machine.gpus, machine.cpu_milli // 1000)} if records else {}
    closed = [one for one in NodeHealth(store).states().values() if one.closed]
    return records, {one.job_id: progress_of(one) for one in records[-_SHOWN:]}, slots, closed


_BADGES = {"running": "running", "queued": "queued", "submitting": "queued", "failed": "error"}
_COLUMNS = (  # name, classes, tooltip
    ("job", "", "Its id: the name in the job file, and a number."),
    ("on", "wide-only", "Where it was submitted: local, ray, slurm or kubernetes."),
    ("state", "", "submitting, queued, running, stopping, done, failed or cancelled."),
    ("devices", "right wide-only", "Devices that it asks for."),
    ("where", "wide-only", "Nodes of its tasks."),
    ("progress", "right", "Training steps done, of all."),
    ("step", "right wide-only", "Measured time of a training step, the median of the last 50."),
    ("predicted", "right wide-only", "Time of a step as predicted when the run started."),
    ("why", "why wide-only", "Why it waits, runs there, or ended."),
)


_TILES: tuple[tuple[str, tuple[JobState, ...], str], ...] = (
    ("Running", ("running", "stopping"), "Jobs whose whole gang is placed."),
    ("Queued", ("queued", "submitting"), "Jobs that wait for devices, or for their target to answer."),
    ("Done", ("done",), "Jobs that finished."),
    ("Failed", ("failed",), "Jobs that ended with an error; their log says why."),
)


def job_tiles_html(records: Sequence[JobRecord]) -> str:
    return "".join(
        tile(name, sum(one.state in states for one in records), "", tip) for name, states, tip in _TILES
    )


def queue_html(
    records: Sequence[JobRecord], progress: Mapping[str, JobProgress | None], may_cancel: bool
) -> str:
    title = heading("All jobs", "Jobs of all targets, waiting, running and ended, newest first.")
    if not records:
        return title + empty(
            "No job yet", "Submit one with: cumulo launch examples/job-train.yaml --on local"
        )
    columns = (*_COLUMNS, ("", "actions", "")) if may_cancel else _COLUMNS
    rows = [_row(one, progress.get(one.job_id) or JobProgress())[: len(columns)] for one in records]
    return title + table(columns, rows, "jobs")


def _row(record: JobRecord, progress: JobProgress) -> list[str]:
    url = f' <a href="{escape(record.url)}">{escape(record.url)}</a>' if record.url else ""
    may_end = not (record.ended or record.cancel_asked)
    return [
        f'<span class="swatch" style="background:{colour(record.job_id)}"></span>'
        f'<b>{escape(record.job_id)}</b>{url}<div class="why narrow-only">{escape(record.reason)}</div>',
        escape(record.target),
        f'<span class="badge {_BADGES.get(record.state, "")}">{record.state}</span>',
        escape(" + ".join(f"{group.count} {group.kind}" for group in record.job.devices)),
        escape(", ".join(dict.fromkeys(place.node for place in record.places)) or "–"),
        "–" if progress.steps is None else f"{progress.step:,} of {progress.steps:,}",
        "–" if progress.step_s is None else quantity(progress.step_s, "s"),
        progress.predicted_text,
        escape(record.reason),
        actions("job", ("logs", "cancel") if may_end else ("logs",), record.job_id),
    ]


def log_html(record: JobRecord) -> str:
    """The end of what a job printed; the style keeps its last line in sight."""
    text = output_tail(output_file(record))[-_LOG_CHARACTERS:]
    begin = f"… cumulo logs {record.job_id} prints all of it\n" if len(text) == _LOG_CHARACTERS else ""
    told = f'<pre class="mono">{escape(begin + text)}</pre>' if text else empty("Nothing is printed yet", "")
    why = escape(f"{record.state}: {record.reason}")
    history = history_html(job_history(record))
    return f'{heading(record.job_id)}<p class="soft">{why}</p>{history}<div class="tail">{told}</div>'


def history_html(history: JobHistory) -> str:
    """The attempts of a job, and why each ended; nothing before the first."""
    if not history.attempts:
        return ""
    columns = [(name, "" if name in ("attempt", "nodes") else "right", tip) for name, tip in ATTEMPT_COLUMNS]
    columns.append(("why it ended", "why", "What the attempt or its driver said at the end."))
    rows = [[escape(cell) for cell in (*attempt_cells(one), one.cause or "–")] for one in history.attempts]
    return f'{table(columns, rows)}<p class="soft">{escape(str(history))}</p>'


def map_html(records: Sequence[JobRecord], slots: Mapping[str, int], closed: Sequence[NodeState] = ()) -> str:
    """A box for each task on each node, in the colour of its job; `slots`: places of nodes that are known whole;
    `closed`: nodes that get no tasks, and why."""
    title = heading("Cluster map", "Nodes with the tasks that run there, coloured by job.")
    tasks: dict[str, list[str]] = {node: [] for node in slots}
    for record in records:
        for place in record.places:
            tasks.setdefault(place.node, []).append(record.job_id)
    if not tasks and not closed:
        return title + empty("No node is in use", "Nodes appear here when a job is placed on them.")
    rows = []
    for node, jobs in sorted(tasks.items()):
        boxes = "".join(_box(job) for job in jobs) + _box("") * max(0, slots.get(node, 0) - len(jobs))
        rows.append(f'<div class="node"><span>{escape(node)}</span><div class="boxes">{boxes}</div></div>')
    told = [
        f'<p><b>{escape(one.node)}</b> <span class="badge error">{one.shown}</span> since {_clock(one.since_s)}: '
        f'<span class="why">{escape(one.reason)}</span></p>'
        for one in closed
    ]
    return f'{title}<div class="cluster-map">{"".join(rows)}</div>{"".join(told)}'


def _box(job_id: str) -> str:
    if not job_id:
        return '<i title="free"></i>'
    return f'<i style="background:{colour(job_id)}" title="{escape(job_id)}"></i>'


def timeline_html(records: Sequence[JobRecord], now_s: float) -> str:
    """When the last jobs waited (thin and pale) and ran; `now_s` is Unix time, as in the records."""
    title = heading("Timeline", "When each job waited and ran.")
    shown = [record for record in records if record.phases]
    if not shown:
        return title + empty("No job yet", "The waiting and running times of jobs appear here.")
    begin_s = min(record.phases[0].begin_s for record in shown)
    if all(record.ended for record in shown):  # until the last one ended: nothing has happened since
        now_s = max(phase.end_s or phase.begin_s for record in shown for phase in record.phases)
    rows = "".join(_track(record, begin_s, now_s) for record in shown)
    ends = f"<time>{_clock(begin_s)}</time><time>{_clock(now_s)}</time>"
    return f'{title}<div class="timeline">{rows}<span></span><div class="ends">{ends}</div></div>'


def _track(record: JobRecord, begin_s: float, now_s: float) -> str:
    whole_s = max(now_s - begin_s, 1.0)
    bars = []
    for phase in record.phases:
        end_s = phase.end_s or (phase.begin_s if record.ended else now_s)
        left, share = (phase.begin_s - begin_s) / whole_s, (end_s - phase.begin_s) / whole_s
        kind = "ran" if phase.state in ("running", "stopping") else "waited"
        tip = f"{record.job_id}: {phase.state} for {quantity(end_s - phase.begin_s, 's')}"
        bars.append(
            f'<i class="{kind}" title="{escape(tip)}" style="left:{left:.2%};width:{share:.2%};'
            f'background:{colour(record.job_id)}"></i>'
        )
    return f'<span>{escape(record.job_id)}</span><div class="track">{"".join(bars)}</div>'


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%H:%M:%S")


def colour(job_id: str) -> str:
    """Always the same for a job, and legible on light and dark pages."""
    return f"hsl({crc32(job_id.encode()) * 137 % 360} 55% 50%)"
