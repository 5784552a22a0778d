"""ThreadView: the messages of a conversation on the chat page. Draws; what the buttons do is the page's."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import takewhile
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from cumulo.console.chat.answer import ChatAnswer
from cumulo.console.chat.answer_view import (
    AnswerActions,
    AnswerView,
    copy_button,
    small_button,
    version_buttons,
)
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


_SHOWN = 40  # entries of a long conversation that are drawn at first
_MORE = 100  # and on request each time
EXAMPLES = (
    "Explain the difference between a process and a thread in three sentences.",
    "Write a Python function that finds the most frequent words of a text.",
    "Make a table of four European capitals, their countries and rivers.",
    "Give me five ideas for a rainy Sunday.",
)


@dataclass(slots=True)
class _Drawn:
    key: object  # what it shows; drawn anew where this changes
    entry: Entry
    root: ui.element
    views: dict[str, AnswerView]  # of answers that are being made, by what they are pending as


class ThreadView:
    def __init__(
        self,
        ask: Callable[[str], Any],
        resend: Callable[[Entry, str], Awaitable[None]],
        delete: Callable[[Entry], Awaitable[None]],
        answer: AnswerActions,
    ) -> None:
        """`ask` sends an example; `resend` and `delete`: what the buttons at a user's message do."""
        self._ask, self._resend, self._delete, self._answer = ask, resend, delete, answer
        self._root = ui.element("div").classes("thread").props('aria-live="polite"')
        self._client = ui.context.client
        self._drawn: list[_Drawn] = []
        self._conversation = Conversation()
        self._from = 0  # the first entry of the branch that is drawn
        with self._root:
            self._welcome = ui.element("div").classes("welcome")
            self._earlier = ui.button("", on_click=self._show_earlier).classes("quiet earlier")
            self._earlier.props("flat dense no-caps")
            self._line = ui.label("").classes("left-out")
        with self._welcome:
            show(empty(f"Talk to {answer.model_name}", "Conversations are kept in this browser only."))
            with ui.element("div").classes("examples"):
                for text in EXAMPLES:
                    example = ui.button(text, on_click=partial(ask, text)).classes("quiet")
                    example.props("outline no-caps align=left")
            show('<p class="keys-hint"><kbd>Ctrl+/</kbd> shows the keyboard shortcuts.</p>')

    def draw(self, conversation: Conversation) -> dict[str, AnswerView]:
        """The shown branch; what is drawn already stays. The views of the answers that are still being made."""
        entries = conversation.entries
        if conversation is not self._conversation:
            self._conversation, self._from = conversation, max(0, len(entries) - _SHOWN)
        self._from = min(self._from, max(0, len(entries) - 1))
        shown = entries[self._from :]
        keys = [self._key(entry, entry is entries[-1]) for entry in shown]
        drawn = zip(keys, self._drawn, strict=False)
        same = len([*takewhile(lambda pair: pair[0] == pair[1].key, drawn)])
        for old in self._drawn[same:]:
            old.root.delete()
        del self._drawn[same:]
        with self._root:
            for place in range(same, len(shown)):
                self._drawn.append(self._make(entries, self._from + place, keys[place]))
        self._welcome.set_visibility(not entries)
        self._count_earlier()
        self.look_down(force=True)
        return {pending: view for one in self._drawn for pending, view in one.views.items()}

    def finish(self, entry: Entry, answer: ChatAnswer, view: AnswerView) -> None:
        """An answer has ended: its view stays, with buttons below it."""
        versions = self._conversation.versions(entry)
        view.finish(answer, entry, versions, is_last=True, results=None)
        for one in self._drawn:
            if one.entry is entry and not entry.get("beside"):
                one.key = self._key(entry, is_last=True)

    def mark(self, place: int, words: str) -> None:
        """A line above the entry at this place of the branch; at -1 none."""
        drawn = place - self._from
        self._line.set_visibility(0 <= drawn < len(self._drawn))
        self._line.set_text(words)
        if 0 <= drawn < len(self._drawn):
            others = [one for one in self._root.default_slot.children if one is not self._line]
            self._line.move(target_index=others.index(self._drawn[drawn].root))

    def look_down(self, *, force: bool = False) -> None:
        """To the newest text, unless the reader has scrolled up."""
        self._client.run_javascript(_LOOK_DOWN.replace("FORCE", "true" if force else "false"))

    def _show_earlier(self) -> None:
        """Draw some more in front of what is drawn: all at once would take seconds in a long conversation."""
        entries, begin = self._conversation.entries, max(0, self._from - _MORE)
        with self._root:
            places = range(begin, self._from)
            earlier = [self._make(entries, place, self._key(entries[place], False)) for place in places]
        first = self._root.default_slot.children.index(self._drawn[0].root)
        for place, one in enumerate(earlier):
            one.root.move(target_index=first + place)
        self._drawn[:0], self._from = earlier, begin
        self._count_earlier()

    def _count_earlier(self) -> None:
        self._earlier.set_visibility(self._from > 0)
        more = f"{min(_MORE, self._from)} of " if self._from > _MORE else ""
        self._earlier.set_text(f"Show {more}{self._from:,} earlier messages")

    def _key(self, entry: Entry, is_last: bool) -> object:
        versions = [id(one) for one in self._conversation.versions(entry)]
        beside = is_last and entry.get("beside")
        return id(entry), is_last, entry.get("pending"), versions, beside

    def _make(self, entries: list[Entry], place: int, key: object) -> _Drawn:
        entry, is_last = entries[place], place == len(entries) - 1
        views: dict[str, AnswerView] = {}
        with ui.element("div").classes("entry") as root:
            if entry["role"] == "user":
                self._user(entry)
            elif entry["role"] == "assistant" and is_last and entry.get("beside"):
                self._compared(entry, views)
            elif entry["role"] == "assistant":
                self._answered(entry, views, is_last, None if is_last else _results(entries, place))
        return _Drawn(key, entry, root, views)

    def _compared(self, entry: Entry, views: dict[str, AnswerView]) -> None:
        versions = self._conversation.versions(entry)
        with ui.element("div").classes("compared-answers"):
            for one in [one for one in versions if one.get("beside") == entry["beside"]]:
                with ui.element("div").classes("shown" if one is entry else ""):
                    self._answered(one, views, True, None)
                    if one is not entry and "pending" not in one:
                        use = ui.button("Use this answer", on_click=partial(self._answer.choose, one))
                        use.props("outline dense no-caps size=sm padding='0 8px'").classes("quiet")

    def _answered(
        self, entry: Entry, views: dict[str, AnswerView], is_last: bool, results: dict[str, str] | None
    ) -> None:
        answer, pending = ChatAnswer.from_entry(entry), entry.get("pending")
        view = AnswerView(answer, self._answer, running=pending is not None)
        if pending is not None:
            views[pending] = view
        else:
            view.finish(answer, entry, self._conversation.versions(entry), is_last=is_last, results=results)

    def _user(self, entry: Entry) -> None:
        with ui.element("div").classes("turn"):
            with ui.element("div").classes("said user") as bubble:
                _message(entry)
            with ui.element("div").classes("turn-buttons") as buttons:
                version_buttons(entry, self._conversation.versions(entry), self._answer.choose)
                small_button("Edit", "edit", lambda: self._edit(entry, bubble, buttons))
                copy_button(entry["content"])
                small_button("Delete turn", "delete_outline", lambda: self._delete(entry))

    def _edit(self, entry: Entry, bubble: ui.element, buttons: ui.element) -> None:
        buttons.set_visibility(False)
        bubble.clear()
        bubble.classes(add="editing")

        async def resend(event: GenericEventArguments) -> None:
            await self._resend(entry, str(event.args or ""))

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
        self._root = ui.element("aside").classes("story-panel").props('aria-label="Story of the request"')
        with self._root:
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
            place = f"/requests/{escape(request_id)}"
            self._link.set_content(f'<a class="small" href="{place}">open as a page</a>')
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
