"""The requests page: the last requests in a table with filters; a request's own page tells its story."""

from collections.abc import Iterable
from html import escape

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.console.sessions import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.console.story_view import story_html
from cumulo.console.words import clock_time, milliseconds, short_id
from cumulo.serve.stories import Record

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


def matching(records: Iterable[Record], outcome: str, words: str) -> Iterable[Record]:
    """Those that ended this way (or all, or run) and have the words in their id or caller."""
    wanted = words.strip().lower()
    for record in records:
        if outcome in ("all", record.outcome or "running") and (
            wanted in record.request_id.lower() or wanted in record.caller.lower()
        ):
            yield record


_COLUMNS = (  # name, classes
    ("received", ""), ("request", ""), ("ended", ""), ("prompt", "right wide-only"), ("output", "right"),
    ("from cache", "right wide-only"), ("queued", "right wide-only"), ("first token", "right wide-only"),
    ("total", "right"), ("caller", "wide-only"),
)  # fmt: skip


def _table(records: list[Record]) -> str:
    head = "".join(f'<th class="{classes}">{name}</th>' for name, classes in _COLUMNS)
    rows = "".join(map(_row, records))
    return f'<table class="plain requests"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _row(record: Record) -> str:
    story = record.story
    total_s = None if record.ended_s is None else record.ended_s - record.received_s
    output = story.output_tokens if story else len(record.token_times_s)
    return (
        f'<tr><td class="num">{clock_time(record.received_s)}</td>'
        f'<td><a class="mono" href="/requests/{escape(record.request_id)}" title="{escape(record.request_id)}">'
        f"{escape(short_id(record.request_id, 10))}</a></td><td>{badge(record)}</td>"
        f'<td class="right num wide-only">{record.prompt_tokens:,}</td><td class="right num">{output:,}</td>'
        f'<td class="right num wide-only">{f"{story.cached_tokens:,}" if story else "–"}</td>'
        f'<td class="right num wide-only">{milliseconds(story.queue_s if story else None)}</td>'
        f'<td class="right num wide-only">{milliseconds(story.ttft_s if story else None)}</td>'
        f'<td class="right num">{milliseconds(total_s)}</td>'
        f'<td class="wide-only">{escape(record.caller)}</td></tr>'
    )


def badge(record: Record) -> str:
    state = record.outcome or "running"
    return f'<span class="badge {escape(state)}">{escape(state)}</span>'


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
