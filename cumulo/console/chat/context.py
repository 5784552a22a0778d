"""ContextView: how full the context is, and which turns are left out of it. Made by the chat page."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nicegui import background_tasks, ui

from cumulo.console.chat.conversation import Conversation
from cumulo.errors import CumuloError
from cumulo.models.text.chat_window import ChatCounter, ChatWindow, sent_messages
from cumulo.serve.service import Service

_EXPLAINED = (
    "Tokens of this conversation that are sent, of those that the context holds, answer included. When it is full, "
    "the oldest turns are left out; the system prompt and the newest message are always sent."
)
Asked = Mapping[str, Any]  # a request without messages: of it max_tokens and tools count


class ContextView:
    def __init__(
        self, find: Callable[[], Service], summarize: Callable[[], Any], mark: Callable[[int, str], None]
    ) -> None:
        """`find` gives the service of the chosen model. `mark` draws a line above the entry at a place of the
        conversation, with words on what is above."""
        self._find, self._mark = find, mark
        self._counted: tuple[Service, ChatCounter] | None = None
        self._client = ui.context.client
        self._newest = 0
        with ui.element("div").classes("meter") as self._root:
            self._bar = ui.element("div").classes("meter-bar").props("role=meter aria-valuemin=0")
            with self._bar:
                self._filled = ui.element("div")
            self._words = ui.label("").classes("num").tooltip(_EXPLAINED)
            self._button = ui.button("Summarize older turns", on_click=summarize)
            self._button.props("flat dense no-caps size=sm padding='0 6px'").classes("quiet")
            with self._button:
                ui.tooltip("The model writes a summary that is sent instead of the older turns.")
        self._root.set_visibility(False)

    @property
    def context(self) -> int:
        """The tokens that the context holds; 0 while the engine has not said it."""
        return self._find().text.max_context

    @property
    def counter(self) -> ChatCounter:
        service = self._find()
        if self._counted is None or self._counted[0] is not service:
            self._counted = service, ChatCounter(service.text.tokenizer)
        return self._counted[1]

    async def fit(self, conversation: Conversation, system: str, asked: Asked) -> list[dict[str, Any]]:
        """The messages that are sent of a conversation. Those that cannot be counted are all sent: the API says
        what is wrong with them."""
        window = await self.window(conversation, system, asked)
        return sent_messages(conversation.messages(), window, system, conversation.summary)

    async def window(self, conversation: Conversation, system: str, asked: Asked) -> ChatWindow:
        messages, tools = conversation.messages(), asked.get("tools", ())
        if not self.context or not messages:
            return ChatWindow()
        try:
            # Apart: long files take a while to count, and everybody's answers come through this thread.
            return await asyncio.to_thread(
                self.counter.window, messages, self.context, asked.get("max_tokens"),
                system=system or None, summary=conversation.summary, tools=tools,
            )  # fmt: skip
        except CumuloError:
            return ChatWindow()

    def refresh(self, conversation: Conversation, system: str, asked: Asked) -> None:
        """Draw the meter and the line anew, as soon as the tokens are counted."""
        self._newest += 1
        background_tasks.create(self._draw(self._newest, conversation, system, asked))

    async def _draw(self, number: int, conversation: Conversation, system: str, asked: Asked) -> None:
        window = await self.window(conversation, system, asked)
        if number != self._newest or self._client.is_deleted:
            return
        with self._client:
            self._root.set_visibility(bool(window.prompt_tokens))
            starts = conversation.turn_starts()
            self._button.set_visibility(len(starts) > 1)
            share = min(1.0, window.prompt_tokens / self.context) if self.context else 0.0
            self._filled.style(f"width: {share:.1%}")
            self._bar.props(f"aria-valuemax={self.context} aria-valuenow={window.prompt_tokens}")
            self._words.set_text(f"{window.prompt_tokens:,} of {self.context:,} tokens")
            summarized = conversation.start > 0
            if window.first or window.shares:
                turns = "turn above is" if window.first == 1 else f"{window.first} turns above are"
                left_out = f"The {turns} no longer sent: the context is full. " if window.first else ""
                short = "Long answers of earlier turns are sent shortened." if window.shares else ""
                self._mark(starts[window.first], left_out + short)
            elif summarized:
                self._mark(
                    conversation.start, f"The turns above are sent as a summary: {conversation.summary}"
                )
            else:
                self._mark(-1, "")
