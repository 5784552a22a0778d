"""The chat page, `/`: talk to the model with every sampling control at hand; stop, ask again, look at the odds."""

import asyncio
import time
from typing import Any

from fastapi import FastAPI
from nicegui import ui
from nicegui.events import GenericEventArguments
from starlette.requests import Request

from cumulo.console.answer_view import AnswerView
from cumulo.console.api_caller import ApiCaller, ApiFailure
from cumulo.console.calls_view import Results
from cumulo.console.knobs import Knobs
from cumulo.console.shell import Shell, empty, show
from cumulo.console.tools_box import ToolsProblem

_REDRAW_S = 0.08  # a page is redrawn at most this often, however fast the tokens come
_TO_END = "const t = document.querySelector('.thread'); if (t) t.scrollTop = t.scrollHeight"


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/", title="Chat · Cumulo")
    def chat(request: Request) -> None:
        with shell.page(request, "/") as visitor:
            Chat(shell, ApiCaller(app, visitor.key))


class Chat:
    """One conversation, kept by its page: closing or reloading the page forgets it."""

    def __init__(self, shell: Shell, api: ApiCaller) -> None:
        self._shell, self._api = shell, api
        self._messages: list[dict[str, Any]] = []  # as the API takes them
        self._last: AnswerView | None = None
        self._hang_up: asyncio.Event | None = None  # set while an answer is being made
        with ui.element("section").classes("talk"):
            self._thread = ui.element("div").classes("thread").props('aria-live="polite"')
            with ui.element("div").classes("ask"):
                self._build_box()
        info = shell.service.engine.info
        with ui.element("aside").classes("knobs") as panel:
            recommended = info.generation_defaults if info is not None else {}
            self._knobs = Knobs(recommended, close=lambda: panel.classes(remove="open"))
        self._open_knobs.on_click(lambda: panel.classes(add="open"))
        self._show_empty()
        ui.context.client.on_disconnect(self.stop)

    def _build_box(self) -> None:
        with ui.element("div").classes("box"):
            self._input = (
                ui.textarea(placeholder="Ask something")
                .props('autogrow borderless dense rows=1 autofocus aria-label="Message"')
                .on("keydown.enter", self.send, js_handler=_ENTER)
            )
            self._send = (
                ui.button(icon="arrow_upward")
                .props('round unelevated dense aria-label="Send"')
                .on("click", self.send, js_handler=_CLICK)
            )
            self._stop = ui.button(icon="stop", on_click=self.stop).props(
                'round unelevated dense aria-label="Stop"'
            )
            self._stop.set_visibility(False)
        with ui.element("div").classes("tools"):
            self._again = _tool("Regenerate", "refresh", self.regenerate)
            self._clear = _tool("Clear", "delete_outline", self.clear)
            self._open_knobs = _tool("Sampling", "tune", None).classes("only-phone")

    # -- what the buttons do ------------------------------------------------------------------------------
    async def send(self, event: GenericEventArguments) -> None:
        # The text comes with the event: what was typed before the page was connected may be told later than it.
        text = str(event.args or "").strip()
        if not text or self._hang_up is not None:
            return
        self._input.set_value("")
        if not self._messages:
            self._thread.clear()
        self._say(text)
        await self._answer()

    def stop(self) -> None:
        if self._hang_up is not None:
            self._hang_up.set()

    async def regenerate(self) -> None:
        """Drop the last answer and ask for another."""
        if self._hang_up is not None or not self._messages:
            return
        if self._messages[-1]["role"] == "assistant":
            self._messages.pop()
            self._thread.remove(self._thread.default_slot.children[-1])
            self._last = None
        await self._answer()

    async def send_results(self, results: Results) -> None:
        """What tools returned, typed in by the person; the model goes on from there."""
        if self._hang_up is None:
            self._messages.extend(results)
            await self._answer()

    def clear(self) -> None:
        if self._hang_up is None:
            self._messages.clear()
            self._thread.clear()
            self._last = None
            self._show_empty()

    # -- the conversation ---------------------------------------------------------------------------------
    def _say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        with self._thread:
            ui.label(text).classes("said user")

    def _show_empty(self) -> None:
        with self._thread:
            show(
                empty(
                    f"Talk to {self._shell.service.model_name}",
                    "Nothing you write here is kept by the server.",
                )
            )
        self._buttons()

    def _buttons(self) -> None:
        running = self._hang_up is not None
        self._send.set_visibility(not running)
        self._stop.set_visibility(running)
        for button in (self._again, self._clear):
            button.set_enabled(not running and bool(self._messages))

    async def _answer(self) -> None:
        if self._last is not None:
            self._last.close()
        problem: ToolsProblem | None = None
        body: dict[str, Any] = {}
        try:
            body = self._knobs.request(self._shell.service.model_name, self._messages)
        except ToolsProblem as error:
            problem = error
        with self._thread:
            view = self._last = AnswerView(bool(body.get("logprobs")), self.send_results)
        if problem is not None:
            view.fail(f"The tools cannot be used: {problem}")
            self._messages.append(view.message())
            self._buttons()
            return
        hang_up = self._hang_up = asyncio.Event()
        self._buttons()
        ui.run_javascript(_TO_END)
        try:
            await self._stream(body, hang_up, view)
        except ApiFailure as failure:
            view.fail(str(failure))
        finally:
            self._hang_up = None
            self._messages.append(view.message())
            self._buttons()
            ui.run_javascript(_TO_END)

    async def _stream(self, body: dict[str, Any], hang_up: asyncio.Event, view: AnswerView) -> None:
        drawn_s = 0.0
        async for event in self._api.stream("/v1/chat/completions", body, hang_up):
            view.take(event)
            if time.monotonic() - drawn_s > _REDRAW_S and not hang_up.is_set():
                view.draw()
                ui.run_javascript(_TO_END)
                drawn_s = time.monotonic()
        view.finish()


# Enter sends, Shift+Enter begins a line, and Enter that ends the composing of a character does neither.
_ENTER = "(e) => { if (!e.shiftKey && !e.isComposing) { e.preventDefault(); emit(e.target.value); } }"
_CLICK = "() => emit(document.querySelector('.ask textarea').value)"


def _tool(text: str, icon: str, action: Any) -> ui.button:
    return ui.button(text, icon=icon, on_click=action).props("flat dense no-caps size=sm").classes("quiet")
