"""BrowserStore: conversations, presets and settings in the browser's own storage. Used by the chat page.

The server keeps no chats: what is said travels through it and stays with the person who said it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from nicegui import ui

from cumulo.console.chat.conversation import Conversation

_SCRIPT = (Path(__file__).parent / "web" / "browser_store.js").read_text("utf-8")
_PATIENCE_S = 20.0


class BrowserStore:
    def __init__(self, visitor: str) -> None:
        # Two people who share a browser with different keys do not meet each other's conversations.
        self._scope = hashlib.sha256(visitor.encode()).hexdigest()[:12]
        self._client = ui.context.client
        ui.add_head_html(f"<script>{_SCRIPT}</script>")

    async def begin(self) -> dict[str, Any]:
        """What is stored: current (or None), chats, presets, settings."""
        return dict(await self._ask("begin", self._scope))

    async def load(self, chat_id: str) -> Conversation | None:
        return Conversation.from_stored(await self._ask("load", chat_id))

    async def chats(self, words: str = "") -> list[dict[str, Any]]:
        return list(await self._ask("list", words))

    async def save(self, conversation: Conversation) -> bool:
        return bool(await self._ask("save", conversation.stored()))

    async def rename(self, chat_id: str, title: str) -> None:
        await self._ask("rename", chat_id, title)

    async def remove(self, chat_id: str) -> None:
        await self._ask("remove", chat_id)

    def stay(self, chat_id: str) -> None:
        """This tab shows this conversation; a reload opens it again."""
        self._tell("stay", chat_id)

    def keep(self, kind: str, value: Any) -> None:
        """`kind`: presets or settings."""
        self._tell("keep", kind, value)

    def download(self, chat_id: str, form: str) -> None:
        self._tell("download", chat_id, form)

    async def _ask(self, name: str, *arguments: Any) -> Any:
        return await self._client.run_javascript(
            f"return cumuloChats.{name}({_arguments(arguments)})", timeout=_PATIENCE_S
        )

    def _tell(self, name: str, *arguments: Any) -> None:
        self._client.run_javascript(f"cumuloChats.{name}({_arguments(arguments)})")


def _arguments(values: tuple[Any, ...]) -> str:
    return ", ".join(json.dumps(value) for value in values)
