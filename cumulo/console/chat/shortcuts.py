"""Shortcuts: the chat page's keys, and the list of them that `?` shows."""

import asyncio
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from nicegui import ui

from cumulo.console.shell import show

_SCRIPT = (Path(__file__).parent / "web" / "shortcuts.js").read_text("utf-8")
KEYS = (
    ("n", "New chat"),
    ("s or Ctrl+K", "Search conversations"),
    ("i or /", "Write a message"),
    ("Enter", "Send the message; Shift+Enter begins a new line"),
    ("Esc", "Close the story, stop the answer, or leave a field"),
    ("r", "Regenerate the last answer"),
    ("? or Ctrl+/", "Show these shortcuts"),
)


class Shortcuts:
    """`actions`: what `new`, `stop` and `regenerate` do."""

    def __init__(self, actions: dict[str, Callable[[], Any]]) -> None:
        self._actions = actions
        ui.add_body_html(f"<script>{_SCRIPT}</script>")
        with ui.dialog() as self._help, ui.card().classes("dialog"):
            rows = "".join(
                f"<tr><td><kbd>{escape(keys)}</kbd></td><td>{escape(words)}</td></tr>" for keys, words in KEYS
            )
            show(f'<h2>Keyboard shortcuts</h2><table class="plain">{rows}</table>')
            show("Single keys work while no field has the focus; Ctrl is ⌘ on a Mac.", "soft small")
        ui.on("shortcut", self._pressed)

    def help(self) -> None:
        self._help.open()

    async def _pressed(self, event: Any) -> None:
        name = str(event.args)
        if name == "help":
            self.help()
        elif name in self._actions:
            result = self._actions[name]()
            if asyncio.iscoroutine(result):
                await result
