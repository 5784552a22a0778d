"""The page Jobs of the console: what `cumulo jobs` shows, as it changes. Jobs are those of the user who runs the
server; only visitors who may operate the server see and cancel them."""

import asyncio
import time

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.cluster.drivers.local import this_machine
from cumulo.cluster.job_progress import JobProgress
from cumulo.cluster.job_store import JobRecord, JobStore, Target, default_store
from cumulo.cluster.launching import cancel, progress_of, refreshed
from cumulo.console.jobs.view import job_tiles_html, map_html, queue_html, timeline_html
from cumulo.console.sessions import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.errors import CumuloError

_REFRESH_S = 2.0
_SHOWN = 40
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
        ui.on("cancel", lambda event: self._cancel(str(event.args)))

    async def tick(self) -> None:
        records, progress, slots = await asyncio.to_thread(_look)
        self._tiles.set_content(job_tiles_html(records))
        newest = records[::-1][:_SHOWN]
        self._queue.set_content(queue_html(newest, progress, self._visitor.may_operate))
        self._map.set_content(map_html([one for one in records if not one.ended], slots))
        self._timeline.set_content(timeline_html(newest, time.time()))

    async def _cancel(self, job_id: str) -> None:
        """Checked here, because a page can be made to send anything."""
        if not (self._visitor.may_operate and self._shell.sessions.still_valid(self._visitor)):
            ui.notify("Your key may not cancel jobs.", type="negative", position="top")
            return
        try:
            await asyncio.to_thread(cancel, JobStore(default_store()), job_id)
            ui.notify(f"{job_id} is asked to end", position="top")
        except CumuloError as error:
            ui.notify(str(error).capitalize(), type="negative", position="top", multi_line=True)
        await self.tick()


def _look() -> tuple[list[JobRecord], dict[str, JobProgress | None], dict[str, int]]:
    store = JobStore(default_store())
    records, _ = refreshed(store, _ASKED)
    machine = this_machine(store)[0]
    slots = {machine.name: max(machine.gpus, machine.cpu_milli // 1000)} if records else {}
    return records, {one.job_id: progress_of(one) for one in records[-_SHOWN:]}, slots
