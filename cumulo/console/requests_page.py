"""The requests page: the last requests in a table with filters; a request's own page tells its story."""

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.console.request_table import _table, badge, matching
from cumulo.console.sessions import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.console.story_view import story_html

_MOST_ROWS = 200
_REFRESH_S = 1.5
_OUTCOMES = ("all", "running", "stop", "length", "abort", "error")


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/requests", title="Requests · Cumulo")
    def requests(request: Request) -> None:
        with shell.page(request, "/requests") as visitor:
            _Table(shell, visitor)

    @ui.page("/requests/{request_id}", title="A request · Cumulo")
    def one(request: Request, request_id: str) -> None:
        with shell.page(request, "/requests") as visitor:
            _tell(shell, visitor, request_id)


class _Table:
    def __init__(self, shell: Shell, visitor: Visitor) -> None:
        self._shell, self._visitor = shell, visitor
        with ui.element("div").classes("filters"):
            self._outcome = ui.toggle(list(_OUTCOMES), value="all", on_change=self._draw).props(
                "unelevated dense no-caps toggle-color=primary padding='4px 10px'"
            )
            self._words = (
                ui.input(placeholder="Part of an id or caller", on_change=self._draw)
                .props('outlined dense clearable debounce=200 aria-label="Filter by id or caller"')
            )  # fmt: skip
        self._body = show("", "card")
        self._draw()
        shell.clock(visitor, _REFRESH_S, self._tick)

    async def _tick(self) -> None:
        self._draw()

    def _draw(self) -> None:
        stories = self._shell.service.stories
        seen = [
            r for r in stories.recent(self._shell.service.options.stories) if self._visitor.may_see(r.caller)
        ]
        chosen = list(matching(seen, str(self._outcome.value), self._words.value or ""))[:_MOST_ROWS]
        if chosen:
            self._body.set_content(_table(chosen))
        elif seen:
            self._body.set_content(empty("No request matches", "Choose “all”, or clear the field."))
        else:
            self._body.set_content(empty("No requests yet", "Whatever is asked of this server appears here."))


def _tell(shell: Shell, visitor: Visitor, request_id: str) -> None:
    records = [r for r in shell.service.stories.of_call(request_id) if visitor.may_see(r.caller)]
    show('<a href="/requests">← all requests</a>', "small").style("margin-bottom: 12px")
    if not records:
        kept = shell.service.options.stories
        show(empty("Nothing is known of this request", f"The last {kept:,} requests are kept."), "card")
        return
    body = show("")

    def draw() -> None:
        body.set_content("".join(f"{story_html(record, badge(record))}" for record in records))

    draw()
    if any(record.outcome is None for record in records):

        async def tick() -> None:
            draw()

        shell.clock(visitor, _REFRESH_S, tick)
