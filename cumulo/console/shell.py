"""Shell: what every page of the console shares: header, colours, who looks, and clocks that run only while seen."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

from nicegui import ui
from starlette.requests import Request

from cumulo.console.front import Sessions, Visitor
from cumulo.console.values import duration
from cumulo.errors import CumuloError
from cumulo.serve.engine_link.messages import BlockMap
from cumulo.serve.model_table import ModelTable
from cumulo.serve.service import Service

ACCENT = "#2b756c"
_STYLE = (Path(__file__).parent / "style.css").read_text("utf-8")
_LINKS = (
    ("/", "Chat"),
    ("/requests", "Requests"),
    ("/live", "Live"),
    ("/fleet", "Fleet"),
    ("/jobs", "Jobs"),
    ("/system", "System"),
)
_THEME_COOKIE = "cumulo_theme"
_PATIENCE_S = 2.0  # for the map of the KV blocks
# The page is told once whether it is seen, and again whenever that changes.
_WATCH_VISIBILITY = """
document.addEventListener('visibilitychange', () => emitEvent('seen', !document.hidden));
if (document.hidden) emitEvent('seen', false);
"""
# By POST: no link or image of another page can log somebody out.
_LOG_OUT = """
const form = document.body.appendChild(document.createElement('form'));
form.method = 'post'; form.action = '/logout'; form.submit();
"""


class Shell:
    def __init__(self, models: ModelTable, sessions: Sessions) -> None:
        self.models, self.service, self.sessions = models, models.first, sessions

    @contextmanager
    def page(self, request: Request, here: str) -> Iterator[Visitor]:
        """The frame of a page; what is made inside becomes its content."""
        visitor = self.sessions.visitor(request.cookies)
        if visitor is None:  # the Front lets nobody else through; a session may end in between
            ui.navigate.to("/login")
            visitor = Visitor("nobody", "")
        ui.add_css(_STYLE)
        ui.colors(primary=ACCENT)
        theme = {"dark": True, "light": False}.get(request.cookies.get(_THEME_COOKIE, ""))
        dark = ui.dark_mode(theme)
        with ui.element("header").classes("top"):
            links = "".join(
                f'<a href="{path}"{" aria-current=page" if path == here else ""}>{name}</a>'
                for path, name in _LINKS
            )
            show(
                f'<a class="brand" href="/">Cumulo</a><nav>{links}</nav>'
                f'<span class="model" title="the served model">{escape(self.service.model_name)}</span>',
                "bar",
            )
            ui.button(icon="contrast", on_click=lambda: _next_theme(dark)).props(
                'flat round dense aria-label="Dark, light or as the system"'
            ).classes("quiet").tooltip("Dark, light, or as the system")
            if self.sessions.needed:
                ui.button(icon="logout", on_click=lambda: ui.run_javascript(_LOG_OUT)).props(
                    'flat round dense aria-label="Log out"'
                ).classes("quiet").tooltip("Log out")
        with ui.element("main").classes(f"content {here.strip('/') or 'chat'}"):
            yield visitor

    def engine_status(self, service: Service | None = None) -> str:
        """Why messages are not answered yet; empty when they are. `service`: that of another model."""
        service = service or self.service
        engine = service.engine
        if self.service.draining:
            return "The server is shutting down and takes no new messages."
        if engine.state == "starting":
            return f"The engine is loading the model, {duration(time.time() - service.started_s)} so far."
        if engine.state == "unloaded":
            return "The model is not in memory; the next request loads it."
        if engine.state == "restarting":
            return "The engine is being restarted after a failure; messages can be sent when it is ready."
        return ""

    async def block_map(self) -> BlockMap | None:
        """The engine's KV blocks; None where it does not answer soon: in a long step, or when it ends."""
        asked = asyncio.create_task(self.service.engine.block_map())
        # Waited for this way because an engine that dies meanwhile cancels the answer, not the page.
        await asyncio.wait([asked], timeout=_PATIENCE_S)
        if not asked.done():
            asked.cancel()
            return None
        return None if asked.cancelled() or asked.exception() is not None else asked.result()

    async def operate(self, visitor: Visitor, act: Callable[[], Awaitable[str] | str]) -> None:
        """Does what a button asks for, and tells what was done. Whether it may be done is checked here, because a
        page can be made to send anything."""
        if not (visitor.may_operate and self.sessions.still_valid(visitor)):
            ui.notify("Your key may not operate the server.", type="negative", position="top")
            return
        try:
            told = act()
            ui.notify(told if isinstance(told, str) else await told, position="top")
        except CumuloError as error:
            ui.notify(str(error).capitalize(), type="negative", position="top", multi_line=True)

    def clock(self, visitor: Visitor, interval_s: float, tick: Callable[[], Awaitable[None] | None]) -> None:
        """Call `tick` now and then at this interval, but only while the page is connected and seen."""
        busy = False

        async def guarded() -> None:
            nonlocal busy
            if busy:  # a slow answer is not asked for twice
                return
            busy = True
            try:
                if not self.sessions.still_valid(visitor):
                    ui.navigate.to("/login")
                elif (ticked := tick()) is not None:
                    await ticked
            finally:
                busy = False

        timer = ui.timer(interval_s, guarded)

        def seen(event: object) -> None:
            timer.active = bool(getattr(event, "args", True))

        ui.on("seen", seen)
        ui.timer(0.1, lambda: ui.run_javascript(_WATCH_VISIBILITY), once=True)


async def asked(title: str, action: str, value: str | None = None, longest: int = 200) -> str | None:
    """What a dialog answers: the text of its field, or without a `value` the action itself; None: cancelled."""
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        field = None
        if value is None:
            ui.label(title)
        else:
            field = ui.input(title, value=value).props(f"outlined dense autofocus maxlength={longest}")
            field.on("keydown.enter", lambda: dialog.submit(field.value))
        with ui.row():
            ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat no-caps")
            button = ui.button(
                action, on_click=lambda: dialog.submit(action if field is None else field.value)
            )
            button.props("unelevated no-caps" + (" color=negative" if field is None else ""))
    answer = await dialog
    dialog.delete()
    return str(answer).strip() or None if answer is not None else None


def show(html: str, classes: str = "") -> ui.html:
    """HTML of ours: whoever makes it has escaped what came from outside."""
    return ui.html(html, sanitize=False).classes(classes)


def empty(title: str, hint: str) -> str:
    return f'<div class="empty"><b>{escape(title)}</b><span>{escape(hint)}</span></div>'


def _next_theme(dark: ui.dark_mode) -> None:
    """Dark, light, as the system is; remembered by the browser."""
    following = {None: True, True: False, False: None}[dark.value]
    dark.set_value(following)
    name = {None: "auto", True: "dark", False: "light"}[following]
    ui.run_javascript(f'document.cookie = "{_THEME_COOKIE}={name}; path=/; max-age=31536000; samesite=lax"')
    ui.notify(f"Theme: {name}", position="top", timeout=900)
