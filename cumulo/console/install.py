"""install: puts the console's pages into the API's application. Called by `cumulo serve` before it listens.

NiceGUI's application is not mounted the usual way, which would take every path the API does not know: the Front
gives it the console's paths only, so that unknown paths of the API stay the API's errors.
"""

import logging
import warnings

from fastapi import FastAPI
from nicegui import app as pages_app
from nicegui import ui

from cumulo.console import fleet_page, jobs_page, live_page, requests_page, system_page
from cumulo.console.chat import page as chat_page
from cumulo.console.front import Front, Sessions
from cumulo.console.machine_use import MachineUse
from cumulo.console.shell import Shell
from cumulo.serve.service import Service

_FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><path fill="#2f7d74" d="M9 26a7 7 0 0 1-.9-13.9'
    'A9 9 0 0 1 25.3 13 6.6 6.6 0 0 1 24.5 26z"/></svg>'
)


def install(app: FastAPI) -> None:
    """One console per process: NiceGUI's application is a global of its module."""
    service: Service = app.state.service
    sessions = Sessions(service.keys)
    shell = Shell(app.state.models, sessions)
    machine = MachineUse(
        lambda: tuple(pid for one in shell.models.services for pid in one.engine.engine_pids)
    )
    pages_app.on_startup(machine.run)
    for page in (chat_page, requests_page, fleet_page, jobs_page, system_page):
        page.register(shell, app)
    live_page.register(shell, app, machine)
    logging.getLogger("nicegui").setLevel(logging.WARNING)
    for name in ("uvicorn.error", "asyncio", "engineio.server"):
        logging.getLogger(name).addFilter(_is_news)
    # NiceGUI looks at every object of the process to find its server; one of torch's complains of that.
    warnings.filterwarnings("ignore", message=".*reduce_op", category=FutureWarning)
    ui.run_with(
        app,
        title="Cumulo",
        favicon=_FAVICON,
        dark=None,  # as the system is; the header's button decides otherwise
        tailwind=False,
        binding_refresh_interval=None,  # nothing is polled while nobody acts
        show_welcome_message=False,
        # A page that does not answer for this long keeps what was entered; after that it is loaded anew. With the
        # default of 3 seconds a browser on a busy machine loses it.
        reconnect_timeout=20.0,
    )
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "app", None) is not pages_app
    ]
    app.add_middleware(Front, pages=pages_app, sessions=sessions)


def _is_news(line: logging.LogRecord) -> bool:
    """Whether a line is worth logging: that a page has opened or closed its socket is not, nor is a page's id, nor
    what a socket sends that is no event of a page, of which there may be thousands a second."""
    said = str(line.msg)
    return not (said.startswith(("connection ", "message async handler")) or "WebSocket" in said
                or "AsyncServer._handle_" in said)  # fmt: skip
