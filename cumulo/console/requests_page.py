"""The requests page: a table with filters, a page for each request's story, and two stories compared."""

import time

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.console.front import Visitor
from cumulo.console.request_view import (
    STATUSES,
    Filter,
    badge,
    compared_html,
    rows_of,
    story_html,
    table_html,
)
from cumulo.console.shell import Shell, empty, show
from cumulo.serve.observe.stories import NotUnique, Record

_MOST_ROWS = 200
_REFRESH_S = 1.5
_TIMES = {0: "any time", 60: "last minute", 300: "last 5 minutes", 3600: "last hour"}
_ALL_KEYS = "all keys"


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/requests", title="Requests · Cumulo")
    def requests(request: Request) -> None:
        with shell.page(request, "/requests") as visitor:
            _Table(shell, visitor)

    @ui.page("/requests/compare", title="Two requests · Cumulo")
    def compare(request: Request, a: str = "", b: str = "") -> None:
        with shell.page(request, "/requests") as visitor:
            _compare(shell, visitor, a, b)

    @ui.page("/requests/{request_id}", title="A request · Cumulo")
    def one(request: Request, request_id: str) -> None:
        with shell.page(request, "/requests") as visitor:
            _tell(shell, visitor, request_id)


class _Table:
    def __init__(self, shell: Shell, visitor: Visitor) -> None:
        self._shell, self._visitor = shell, visitor
        self._queued: frozenset[str] = frozenset()
        self._picked: list[str] = []
        with ui.element("div").classes("filters"):
            self._status = ui.toggle(list(STATUSES), value="all", on_change=self._draw).props(
                "unelevated dense no-caps toggle-color=primary padding='4px 10px'"
            )
            self._key = ui.select([_ALL_KEYS], value=_ALL_KEYS, label="API key", on_change=self._draw)
            self._time = ui.select(_TIMES, value=0, label="Received", on_change=self._draw)
            for field in (self._key, self._time):
                field.props("outlined dense options-dense")
            self._words = ui.input(placeholder="Part of an id, key or reason", on_change=self._draw).props(
                'outlined dense clearable debounce=200 aria-label="Filter by id, key or reason"'
            )
            self._compare = ui.button("Compare", icon="compare", on_click=self._open_comparison)
            self._compare.props("flat dense no-caps").classes("quiet").tooltip(
                "Shows the stories of two requests side by side; choose them in the first column."
            )
        self._body = show("", "card")
        ui.on("pick", self._pick)
        self._draw()
        shell.clock(visitor, _REFRESH_S, self._tick)

    async def _tick(self) -> None:
        self._queued = await self._waiting()
        self._draw()

    async def _waiting(self) -> frozenset[str]:
        """Requests without a KV block, asked of the engine only while something waits there."""
        engine = self._shell.service.engine
        if not engine.waiting or engine.state != "ready":
            return frozenset()
        blocks = await self._shell.block_map()
        return self._queued if blocks is None else frozenset(engine.in_flight) - frozenset(blocks.owners)

    def _draw(self) -> None:
        service, visitor = self._shell.service, self._visitor
        seen = rows_of(
            (r for r in service.stories.recent(service.options.stories) if visitor.may_see(r.caller)),
            (r for r in service.rejections.recent() if visitor.may_see(r.caller)),
            self._queued,
        )
        self._offer_keys(sorted({row.caller for row in seen}))
        since_s = time.perf_counter() - self._time.value if self._time.value else 0.0
        caller = "" if self._key.value == _ALL_KEYS else str(self._key.value)
        chosen = Filter(str(self._status.value), caller, since_s, self._words.value or "")
        rows = [row for row in seen if row.is_let_through(chosen)][:_MOST_ROWS]
        self._compare.set_enabled(len(self._picked) == 2)
        if rows:
            self._body.set_content(table_html(rows, self._picked))
        elif seen:
            self._body.set_content(empty("No request matches", "Change the filters above."))
        else:
            self._body.set_content(empty("No requests yet", "Every request to this server appears here."))

    def _offer_keys(self, callers: list[str]) -> None:
        options = [_ALL_KEYS, *callers]
        if options != self._key.options:
            kept = self._key.value if self._key.value in options else _ALL_KEYS
            self._key.set_options(options, value=kept)

    def _pick(self, event: object) -> None:
        """The third choice replaces the first."""
        name = str(getattr(event, "args", ""))
        if name in self._picked:
            self._picked.remove(name)
        else:
            self._picked = [*self._picked, name][-2:]
        self._draw()

    def _open_comparison(self) -> None:
        first, second = self._picked
        ui.navigate.to(f"/requests/compare?a={first}&b={second}")


def _find(shell: Shell, visitor: Visitor, request_id: str) -> list[Record]:
    """The records of a request, by its id or a short form of it; an empty list, and words on the page, if there
    are none."""
    stories, kept = shell.service.stories, shell.service.options.stories
    hint = f"The server keeps the last {kept:,} requests, until it is restarted."
    records: list[Record] = []
    try:
        records = stories.named(request_id, visitor.may_see)
    except NotUnique as error:
        hint = f"{error}.".capitalize()
    if not records:
        show(empty("Nothing is known of this request", hint), "card")
    return records


def _tell(shell: Shell, visitor: Visitor, request_id: str) -> None:
    show('<a href="/requests">← all requests</a>', "small back")
    records = _find(shell, visitor, request_id)
    if not records:
        return
    body = show("")

    def draw() -> None:
        body.set_content("".join(f"{story_html(record, badge(record))}" for record in records))

    draw()
    if any(record.outcome is None for record in records):
        shell.clock(visitor, _REFRESH_S, draw)


def _compare(shell: Shell, visitor: Visitor, first: str, second: str) -> None:
    show('<a href="/requests">← all requests</a>', "small back")
    found = [_find(shell, visitor, name) for name in (first, second)]
    if all(found):
        one, other = found[0][0], found[1][0]
        show(compared_html(one, other))
        show(story_html(one, badge(one)) + story_html(other, badge(other)), "pair stories")
