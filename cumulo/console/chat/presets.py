"""Presets: system prompts to choose from: a few of ours, and those that the person saved in the browser."""

from collections.abc import Callable
from typing import Any

from nicegui import ui

from cumulo.console.answer_view import small_button

BUILT_IN = {
    "Assistant": "You are a helpful assistant. Answer clearly, and say so when you do not know.",
    "Short answers": "Answer in at most two sentences. No introduction, no repetition of the question.",
    "Programmer": "You are a programmer. Give working code in a fenced block, then explain it briefly.",
    "Editor": "Correct spelling and grammar of the text you are given. Return only the corrected text.",
    "Translator": "Translate the text you are given into English. Return only the translation.",
    "Summary": "Summarise the text you are given in three bullet points.",
}
MOST_OWN = 50
_LONGEST_NAME, _LONGEST_PROMPT = 40, 20_000


def read_own(stored: Any) -> dict[str, str]:
    """The person's own presets as the browser kept them; what is none is left out."""
    if not isinstance(stored, dict):
        return {}
    kept = {
        name: prompt
        for name, prompt in stored.items()
        if isinstance(prompt, str) and 0 < len(name) <= _LONGEST_NAME and len(prompt) <= _LONGEST_PROMPT
    }
    return dict(list(kept.items())[:MOST_OWN])


class Presets:
    """The system prompt's field and the choice above it. `keep` stores the own ones, `changed` the field."""

    def __init__(self, keep: Callable[[dict[str, str]], None], changed: Callable[[], None]) -> None:
        self._keep, self._changed = keep, changed
        self._own: dict[str, str] = {}
        self._edited: str | None = None  # the own preset whose text was changed since it was chosen
        with ui.element("div").classes("preset-row"):
            self._choice = ui.select(list(BUILT_IN), label="Preset", clearable=True, on_change=self._chosen)
            self._choice.props("outlined dense options-dense")
            small_button("Save as preset", "bookmark_add", self._save)
            self._delete = small_button("Delete preset", "delete_outline", self._remove)
        self._delete.set_visibility(False)
        self._prompt = ui.textarea("System prompt", on_change=self._typed).props("outlined dense autogrow")

    @property
    def prompt(self) -> str:
        return str(self._prompt.value or "").strip()

    def restore(self, own: dict[str, str], prompt: str) -> None:
        self._own = own
        named = next((name for name, text in (BUILT_IN | own).items() if text == prompt), None)
        self._prompt.set_value(prompt)
        self._choice.set_options([*BUILT_IN, *own], value=named)

    def _chosen(self) -> None:
        name = self._choice.value
        self._delete.set_visibility(name in self._own)
        if name is not None:
            self._edited = None
            self._prompt.set_value((BUILT_IN | self._own).get(name, self.prompt))
        elif self.prompt in (BUILT_IN | self._own).values():  # the choice was cleared, and with it its text
            self._prompt.set_value("")

    def _typed(self) -> None:
        """A text that is no longer the preset's is not shown under its name."""
        name = self._choice.value
        if name is not None and self._prompt.value != (BUILT_IN | self._own).get(name):
            self._edited = name if name in self._own else None
            self._choice.set_value(None)
        self._changed()

    async def _save(self) -> None:
        if not self.prompt:
            ui.notify("Write a system prompt first.", position="top")
            return
        with ui.dialog() as dialog, ui.card().classes("dialog"):
            field = ui.input("Name of the preset", value=self._edited or "").props(
                f"outlined dense autofocus maxlength={_LONGEST_NAME}"
            )
            field.on("keydown.enter", lambda: dialog.submit(field.value))
            with ui.row():
                ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat no-caps")
                ui.button("Save", on_click=lambda: dialog.submit(field.value)).props("unelevated no-caps")
        name = str(await dialog or "").strip()
        dialog.delete()
        if not name:
            return
        if name in BUILT_IN:
            ui.notify(f"“{name}” is a built-in preset; choose another name.", position="top")
            return
        self._store(self._own | {name: self.prompt}, name)

    def _remove(self) -> None:
        self._store({name: prompt for name, prompt in self._own.items() if name != self._choice.value}, None)

    def _store(self, own: dict[str, str], chosen: str | None) -> None:
        self._own = read_own(own)
        self._choice.set_options([*BUILT_IN, *self._own], value=chosen)
        self._keep(self._own)
