"""StoryPanel: a request's story next to the conversation, so that reading it does not leave the chat."""

from html import escape

from nicegui import ui

from cumulo.console.answer_view import small_button
from cumulo.console.request_table import badge
from cumulo.console.sessions import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.console.story_view import story_html


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
