"""AskBox: where a message is written on the chat page: text, attached files, send, stop, and errors."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from cumulo.console.chat.answer_view import small_button
from cumulo.console.chat.conversation import LARGEST_FILE_BYTES, MOST_FILES, Entry, read_files
from cumulo.console.chat.pdf import LARGEST_PDF_BYTES, pdf_text
from cumulo.console.shell import show

# Enter sends, Shift+Enter begins a line, and Enter that ends the composing of a character does neither.
_ENTER = "(e) => { if (!e.shiftKey && !e.isComposing) { e.preventDefault(); emit(e.target.value); } }"
_CLICK = "() => emit(document.querySelector('.ask textarea').value)"
_SCRIPT = (Path(__file__).parent / "web" / "attach_files.js").read_text("utf-8")
_SCRIPT = _SCRIPT.replace('"LARGEST_BYTES"', str(LARGEST_FILE_BYTES))
_SCRIPT = _SCRIPT.replace('"LARGEST_PDF_BYTES"', str(LARGEST_PDF_BYTES))
_CHOSEN = "cumuloAttach([...this.files]); this.value = '';"


class AskBox:
    def __init__(
        self,
        send: Callable[[str], Awaitable[None]],
        stop: Callable[[], None],
        unqueue: Callable[[Entry], Any],
        count_tokens: Callable[[str], int],
        context: Callable[[], int],
    ) -> None:
        self._on_send, self._unqueue, self._count_tokens, self._context = send, unqueue, count_tokens, context
        self.files: list[dict[str, str]] = []
        self._tokens: dict[str, int] = {}  # of the attached texts
        self._pdf: list[str] = []  # the parts of a PDF that have come
        ui.add_body_html(f"<script>{_SCRIPT}</script>")
        with ui.element("div").classes("ask"):
            self._problem = ui.label("").classes("problem ask-problem").props("role=alert")
            self._status = ui.label("").classes("ask-status").props("role=status")
            self._queued = ui.element("div").classes("chips")
            self._chips = ui.element("div").classes("chips")
            with ui.element("div").classes("box"):
                attach = small_button("Attach text or PDF files", "attach_file", None)
                attach.on("click", js_handler="() => document.getElementById('ask-file').click()")
                with attach:
                    ui.tooltip(
                        f"Attach text files of up to {LARGEST_FILE_BYTES // 1000} kB and PDF files of up to "
                        f"{LARGEST_PDF_BYTES // 1_000_000} MB, or drop them here."
                    )
                show(f'<input type="file" id="ask-file" multiple hidden onchange="{_CHOSEN}">')
                self._input = (
                    ui.textarea(placeholder="Ask something")
                    .props('autogrow borderless dense rows=1 autofocus aria-label="Message"')
                    .on("keydown.enter", self._sent, js_handler=_ENTER)
                )
                self._send = (
                    ui.button(icon="arrow_upward")
                    .props('round unelevated dense aria-label="Send"')
                    .on("click", self._sent, js_handler=_CLICK)
                )
                self._stop = ui.button(icon="stop", on_click=stop).props(
                    'round unelevated dense aria-label="Stop"'
                )
                with self._stop:
                    ui.tooltip("Stop the answer (Esc)")
        for element in (self._problem, self._status, self._stop):
            element.set_visibility(False)
        ui.on("file", self._attached)
        ui.on("pdf", self._pdf_came)

    def set_running(self, running: bool) -> None:
        """While an answer is being made, a message waits for its end."""
        self._stop.set_visibility(running)

    def show_queued(self, entries: list[Entry]) -> None:
        self._queued.clear()
        with self._queued:
            for entry in entries:
                with ui.element("div").classes("file-chip"):
                    ui.icon("schedule")
                    ui.label(f"Queued: {entry['content'] or entry['files'][0]['name']}").classes("one-line")
                    small_button("Take out of the queue", "close", partial(self._unqueue, entry))

    def set_status(self, words: str) -> None:
        if words != self._status.text:
            self._status.set_text(words)
            self._status.set_visibility(bool(words))

    def complain(self, words: str) -> None:
        self._problem.set_text(words[:1].upper() + words[1:])
        self._problem.set_visibility(bool(words))

    def empty(self) -> None:
        self.complain("")
        self.files, self._tokens = [], {}
        self._draw_chips()
        self._input.value = ""
        self._input.update()  # also where the page has not told yet what was typed

    def put_back(self, text: str, files: list[dict[str, str]], problem: str) -> None:
        """A message that was refused is not lost; what was typed meanwhile stays below it."""
        typed = str(self._input.value or "")
        self._input.value = f"{text}\n{typed}" if typed.strip() else text
        self._input.update()
        self.files = files + self.files
        self._draw_chips()
        self.complain(problem)

    # -- events -------------------------------------------------------------------------------------------
    async def _sent(self, event: GenericEventArguments) -> None:
        # The text comes with the event: what was typed before the page was connected may be told later than it.
        await self._on_send(str(event.args or "").strip())

    async def _attached(self, event: Any) -> None:
        given = event.args if isinstance(event.args, dict) else {}
        await self._attach(str(given.get("name", "file"))[:120], given.get("text"), given.get("problem"))

    async def _pdf_came(self, event: Any) -> None:
        """A part of a PDF; with the last one its text is extracted."""
        given = event.args if isinstance(event.args, dict) else {}
        name, part, data = str(given.get("name"))[:120], given.get("part"), str(given.get("data"))
        self._pdf = [*(self._pdf if part else ()), data]
        if sum(map(len, self._pdf)) * 3 // 4 > LARGEST_PDF_BYTES + 3:
            self._pdf = []
        elif part == int(given.get("parts") or 0) - 1:
            parts, self._pdf = self._pdf, []
            self.set_status(f"Reading {name} …")
            text, problem = None, None
            try:
                text = await asyncio.to_thread(pdf_text, b"".join(map(base64.b64decode, parts)))
            except ValueError as error:
                problem = str(error)
            self.set_status("")
            await self._attach(name, text, problem)

    async def _attach(self, name: str, text: object, problem: object) -> None:
        files = read_files([{"name": name, "text": text}])
        if len(self.files) >= MOST_FILES:
            problem = problem or f"would be too many: a message takes at most {MOST_FILES} files"
        if not problem and not files:
            problem = f"has more than {LARGEST_FILE_BYTES:,} characters of text"
        self.complain(f"{name} cannot be attached: it {problem}." if problem else "")
        if not problem:
            self.files += files
            self._draw_chips()
            self._tokens[files[0]["text"]] = await asyncio.to_thread(self._count_tokens, files[0]["text"])
            taken, context = sum(self._tokens.get(one["text"], 0) for one in self.files), self._context()
            if context and taken > context * 3 // 4:  # a quarter is the answer's
                self.files.remove(files[0])
                self.complain(
                    f"{name} cannot be attached: the files would take {taken:,} tokens, and the context holds "
                    f"{context:,}, an answer included."
                )
            self._draw_chips()

    def _draw_chips(self) -> None:
        self._chips.clear()
        with self._chips:
            for file in self.files:
                with ui.element("div").classes("file-chip"):
                    ui.icon("description")
                    tokens = self._tokens.get(file["text"])
                    counted = "" if tokens is None else f", {tokens:,} tokens"
                    ui.label(f"{file['name']} ({len(file['text']):,} characters{counted})")
                    small_button(f"Remove {file['name']}", "close", partial(self._remove, file))

    def _remove(self, file: dict[str, str]) -> None:
        self.files = [one for one in self.files if one is not file]
        self._draw_chips()


_KEYS_SCRIPT = (Path(__file__).parent / "web" / "shortcuts.js").read_text("utf-8")
KEYS = (
    ("n", "New chat"),
    ("s or Ctrl+K", "Search conversations"),
    ("i or /", "Write a message"),
    ("Enter", "Send the message, after the answer under way; Shift+Enter begins a new line"),
    ("Esc", "Close the story, stop the answer, or leave a field"),
    ("r", "Regenerate the last answer"),
    ("? or Ctrl+/", "Show these shortcuts"),
)


class Shortcuts:
    """`actions`: what `new`, `stop` and `regenerate` do."""

    def __init__(self, actions: dict[str, Callable[[], Any]]) -> None:
        self._actions = actions
        ui.add_body_html(f"<script>{_KEYS_SCRIPT}</script>")
        with ui.dialog() as self._help, ui.card().classes("dialog"):
            rows = "".join(
                f"<tr><td><kbd>{escape(keys)}</kbd></td><td>{escape(words)}</td></tr>" for keys, words in KEYS
            )
            show(f'<h2>Keyboard shortcuts</h2><table class="plain">{rows}</table>')
            show("Single keys work while no field has the focus; Ctrl is ⌘ on a Mac.", "soft small")
        ui.on("shortcut", self._pressed)

    async def _pressed(self, event: Any) -> None:
        name = str(event.args)
        if name == "help":
            self._help.open()
        elif name in self._actions:
            result = self._actions[name]()
            if asyncio.iscoroutine(result):
                await result
