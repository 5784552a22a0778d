"""HistoryPanel: the conversations that this browser keeps: search, open, rename, delete, export, import."""

import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nicegui import ui

from cumulo.console.chat.answer_view import small_button
from cumulo.console.chat.conversation import Conversation
from cumulo.console.shell import asked, show

_SCRIPT = (Path(__file__).parent / "web" / "browser_store.js").read_text("utf-8")
_PATIENCE_S = 20.0
_OFFER = "cumuloChats.offer(this.files[0]); this.value = '';"


class BrowserStore:
    def __init__(self, visitor: str) -> None:
        # Two people who share a browser with different keys do not meet each other's conversations.
        self.scope = hashlib.sha256(visitor.encode()).hexdigest()[:12]
        self._client = ui.context.client
        ui.add_head_html(f"<script>{_SCRIPT}</script>")

    async def load(self, chat_id: str) -> Conversation | None:
        return Conversation.from_stored(await self.read(chat_id))

    async def read(self, chat_id: str) -> Any:
        """What is stored, part by part; without an id: what is imported. None if it is no JSON."""
        parts: list[str] = []
        while part := await self.ask("part", chat_id, len(parts)):
            parts.append(part)
        try:  # a part may end within a character of two UTF-16 units
            return json.loads("".join(parts).encode("utf-16", "surrogatepass").decode("utf-16"))
        except ValueError:
            return None

    async def ask(self, name: str, *arguments: Any) -> Any:
        """What a function of browser_store.js answers."""
        return await self._client.run_javascript(
            f"return cumuloChats.{name}({_arguments(arguments)})", timeout=_PATIENCE_S
        )

    def tell(self, name: str, *arguments: Any) -> None:
        self._client.run_javascript(f"cumuloChats.{name}({_arguments(arguments)})")


def _arguments(values: tuple[Any, ...]) -> str:
    return ", ".join(json.dumps(value) for value in values)


_MOST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class HistoryActions:
    new: Callable[[], Awaitable[None]]
    open: Callable[[str], Awaitable[None]]  # given the conversation's id
    renamed: Callable[[str, str], None]
    deleted: Callable[[str], Awaitable[None]]


class HistoryPanel:
    def __init__(self, store: BrowserStore, actions: HistoryActions) -> None:
        self._store, self._actions = store, actions
        self._current = ""
        with ui.element("aside").classes("history").props('aria-label="Conversations"') as self._root:
            with ui.element("div").classes("panel-head"):
                new = ui.button("New chat", icon="add", on_click=self._new)
                new.props("unelevated dense no-caps").classes("new-chat")
                bring = small_button("Import a conversation", "upload", None)
                bring.on("click", js_handler="() => document.getElementById('import-file').click()")
                with bring:
                    ui.tooltip("Import a conversation that was exported as JSON, here or by somebody else.")
                show(f'<input type="file" id="import-file" accept=".json" hidden onchange="{_OFFER}">')
                small_button("Close conversations", "close", self.close).classes("only-phone")
            self._search = ui.input(placeholder="Search", on_change=self.refresh).props(
                'outlined dense clearable debounce=150 aria-label="Search conversations"'
            )
            self._list = ui.element("ul").classes("chats")
        ui.on("import", self._import)

    def open(self) -> None:
        self._root.classes(add="open")

    def close(self) -> None:
        self._root.classes(remove="open")

    async def show_current(self, chat_id: str) -> None:
        self._current = chat_id
        await self.refresh()

    async def refresh(self) -> None:
        self.draw(await self._store.ask("list", str(self._search.value or "")))

    def draw(self, chats: list[dict[str, Any]], current: str | None = None) -> None:
        if current is not None:
            self._current = current
        self._list.clear()
        with self._list:
            for chat in chats[:_MOST_SHOWN]:
                self._row(str(chat["id"]), str(chat["name"]), float(chat["updated_s"]))
            if not chats:
                searched = str(self._search.value or "").strip()
                told = "No conversation matches." if searched else "No conversations yet."
                ui.label(told).classes("soft small")

    def _row(self, chat_id: str, name: str, updated_s: float) -> None:
        with ui.element("li").classes("current" if chat_id == self._current else ""):
            with ui.element("button").classes("chat-name").props("type=button") as button:
                ui.label(name)
                ui.label(when(updated_s)).classes("soft when")
            button.on("click", lambda: self._open(chat_id))
            with small_button(f"Menu of {name}".replace('"', ""), "more_vert", None), ui.menu():
                ui.menu_item("Rename", lambda: self._rename(chat_id, name))
                ui.menu_item("Copy as Markdown", lambda: self._store.tell("copy", chat_id))
                ui.menu_item("Export as Markdown", lambda: self._store.tell("download", chat_id, "markdown"))
                ui.menu_item("Export as JSON", lambda: self._store.tell("download", chat_id, "json"))
                ui.menu_item("Delete", lambda: self._delete(chat_id, name))

    async def _new(self) -> None:
        self.close()
        await self._actions.new()

    async def _open(self, chat_id: str) -> None:
        self.close()
        await self._actions.open(chat_id)

    async def _import(self) -> None:
        given = await self._store.read("")
        stored = {**given, "id": secrets.token_hex(12)} if isinstance(given, dict) else None
        kept = Conversation.from_stored(stored)
        if kept is None or not await self._store.ask("save", kept.stored()):
            ui.notify("This is no conversation that was exported as JSON.", type="negative", position="top")
            return
        await self._open(kept.id)

    async def _rename(self, chat_id: str, name: str) -> None:
        title = await asked("Name of the conversation", "Rename", name)
        if title is not None:
            await self._store.ask("rename", chat_id, title)
            self._actions.renamed(chat_id, title)
            await self.refresh()

    async def _delete(self, chat_id: str, name: str) -> None:
        if await asked(f"Delete “{name}”? This cannot be undone.", "Delete"):
            await self._store.ask("remove", chat_id)
            await self._actions.deleted(chat_id)
            await self.refresh()


def when(updated_s: float) -> str:
    """The time today, the date before."""
    moment, now = datetime.fromtimestamp(updated_s), datetime.fromtimestamp(time.time())
    return moment.strftime("%H:%M" if moment.date() == now.date() else f"{moment.day} %b %Y")
