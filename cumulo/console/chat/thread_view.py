"""ThreadView: the messages of a conversation on the chat page. Draws; what the buttons do is the page's."""

from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from cumulo.console.chat.answer import ChatAnswer
from cumulo.console.chat.answer_view import AnswerActions, AnswerView, copy_button, small_button
from cumulo.console.chat.conversation import Conversation, Entry
from cumulo.console.front import Visitor
from cumulo.console.request_view import badge, story_html
from cumulo.console.shell import Shell, empty, show

_LOOK_DOWN = """
const t = document.querySelector('.thread');
if (t && (FORCE || t.scrollHeight - t.scrollTop - t.clientHeight < 160)) t.scrollTop = t.scrollHeight
"""
_EDITED = (
    "(e) => { if (e.type !== 'keydown' || (e.key === 'Enter' && !e.shiftKey && !e.isComposing)) {"
    " e.preventDefault(); emit(e.target.closest('.editing').querySelector('textarea').value); } }"
)


class ThreadView:
    def __init__(
        self,
        resend: Callable[[int, str], Awaitable[None]],
        delete: Callable[[int], Awaitable[None]],
        answer: AnswerActions,
    ) -> None:
        """`resend` and `delete`: what the buttons at a user's message do, given its place in the conversation."""
        self._resend, self._delete, self._answer = resend, delete, answer
        self._root = ui.element("div").classes("thread").props('aria-live="polite"')
        self._client = ui.context.client

    def draw(self, conversation: Conversation) -> AnswerView | None:
        """All of it anew; the view of the answer that is still being made, if one is."""
        self._root.clear()
        running: AnswerView | None = None
        entries = conversation.entries
        with self._root:
            if not entries:
                words = empty(
                    f"Talk to {self._answer.model_name}", "Conversations are kept in this browser only."
                )
                show(
                    f'{words}<p class="keys-hint"><kbd>Ctrl+/</kbd> shows the keyboard shortcuts.</p>',
                    "welcome",
                )
            for index, entry in enumerate(entries):
                if entry["role"] == "user":
                    self._user(index, entry)
                elif entry["role"] == "assistant" and "pending" in entry:
                    running = AnswerView(ChatAnswer(), self._answer, running=True)
                elif entry["role"] == "assistant":
                    answer = ChatAnswer.from_entry(entry)
                    is_last = index == len(entries) - 1
                    view = AnswerView(answer, self._answer, running=False)
                    view.finish(
                        answer, is_last=is_last, results=None if is_last else _results(entries, index)
                    )
        self.look_down(force=True)
        return running

    def look_down(self, *, force: bool = False) -> None:
        """To the newest text, unless the reader has scrolled up."""
        self._client.run_javascript(_LOOK_DOWN.replace("FORCE", "true" if force else "false"))

    def _user(self, index: int, entry: Entry) -> None:
        with ui.element("div").classes("turn"):
            with ui.element("div").classes("said user") as bubble:
                _message(entry)
            with ui.element("div").classes("turn-buttons") as buttons:
                small_button("Edit", "edit", lambda: self._edit(index, entry, bubble, buttons))
                copy_button(entry["content"])
                small_button("Delete turn", "delete_outline", lambda: self._delete(index))

    def _edit(self, index: int, entry: Entry, bubble: ui.element, buttons: ui.element) -> None:
        buttons.set_visibility(False)
        bubble.clear()
        bubble.classes(add="editing")

        async def resend(event: GenericEventArguments) -> None:
            await self._resend(index, str(event.args or ""))

        def cancel() -> None:
            bubble.classes(remove="editing")
            bubble.clear()
            buttons.set_visibility(True)
            with bubble:
                _message(entry)

        with bubble:
            field = ui.textarea(value=entry["content"]).props(
                'autogrow borderless dense autofocus aria-label="Edit message"'
            )
            field.on("keydown", resend, js_handler=_EDITED)
            with ui.element("div").classes("edit-buttons"):
                ui.button("Cancel", on_click=cancel).props("flat dense no-caps").classes("quiet")
                ui.button("Send").props("unelevated dense no-caps").on("click", resend, js_handler=_EDITED)


def _message(entry: Entry) -> None:
    for file in entry.get("files", ()):
        with ui.element("div").classes("file-chip"):
            ui.icon("description")
            ui.label(f"{file['name']} ({len(file['text']):,} characters)")
    ui.label(entry["content"])


def _results(entries: list[Entry], index: int) -> dict[str, str]:
    """What was returned to the calls of this answer."""
    found: dict[str, Any] = {}
    for entry in entries[index + 1 :]:
        if entry["role"] != "tool":
            break
        found[str(entry.get("tool_call_id"))] = entry["content"]
    return found


class StoryPanel:
    def __init__(self, shell: Shell, visitor: Visitor) -> None:
        self._shell, self._visitor = shell, visitor
        with (
            ui.element("aside")
            .classes("story-panel")
            .props('aria-label="Story of the request"') as self._root
        ):
            with ui.element("div").classes("panel-head"):
                show("<h2>Story of the request</h2>")
                self._link = show("")
                small_button("Close story", "close", self.close)
            self._body = show("")

    def open(self, request_id: str) -> None:
        stories = self._shell.service.stories
        records = [r for r in stories.of_call(request_id) if self._visitor.may_see(r.caller)]
        if records:
            self._body.set_content("".join(story_html(record, badge(record)) for record in records))
            self._link.set_content(
                f'<a class="small" href="/requests/{escape(request_id)}">open as a page</a>'
            )
        else:
            kept = self._shell.service.options.stories
            hint = f"The server keeps the last {kept:,} requests, until it is restarted."
            self._link.set_content("")
            self._body.set_content(empty("Nothing is known of this request", hint))
        self._root.classes(add="open")

    def close(self) -> bool:
        """Whether it was open."""
        was_open = "open" in self._root.classes
        self._root.classes(remove="open")
        return was_open
