"""The live page: how fast, how long one waits, what the last steps held, who owns the KV blocks, memory."""

import asyncio
import time
from html import escape

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.console.charts import block_chart, steps_chart, throughput_chart
from cumulo.console.live_numbers import Throughput, latencies
from cumulo.console.sessions import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.console.story_view import tile
from cumulo.engine.ledger import format_bytes
from cumulo.serve.messages import BlockMap, Ready

_REFRESH_S = 1.0
_STEPS_SHOWN = 96
_STEPS_TOLD = 6
_JUDGED_REQUESTS = 64
_MAP_PATIENCE_S = 2.0


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/live", title="Live · Cumulo")
    def live(request: Request) -> None:
        with shell.page(request, "/live") as visitor:
            page = _Live(shell, visitor)
            shell.clock(visitor, _REFRESH_S, page.tick)


class _Live:
    def __init__(self, shell: Shell, visitor: Visitor) -> None:
        self._service, self._visitor = shell.service, visitor
        self._throughput = Throughput()
        self._map_mark: object = None  # what the block map drawn last belonged to
        self._tiles = show("", "tiles")
        with ui.element("div").classes("pair"):
            with ui.element("div"):
                self._rates = _card("Tokens per second, the last minute")
                self._map = _card("KV blocks")
            with ui.element("div"):
                self._steps = _card(f"What the last {_STEPS_SHOWN} steps held")
        self._ledger = _card("Memory: predicted beside measured")
        self._map.set_content(empty("Nothing to show yet", "The map appears when the engine runs."))
        self._ledger_drawn_for: Ready | None = None

    async def tick(self) -> None:
        now_s = time.perf_counter()
        steps = list(self._service.recent_steps)
        self._throughput.take(steps, now_s)
        self._draw_tiles(now_s)
        if steps:
            self._rates.set_content(throughput_chart(self._throughput.history(now_s)))
            told = "".join(
                f'<tr><td class="num">{s.index}</td><td class="right num">{s.prefill_tokens}</td>'
                f'<td class="right num">{s.decode_tokens}</td>'
                f'<td class="right num">{(s.finished_s - s.started_s) * 1e3:.1f} ms</td></tr>'
                for s in reversed(steps[-_STEPS_TOLD:])
            )
            self._steps.set_content(
                steps_chart(steps[-_STEPS_SHOWN:])
                + '<table class="plain"><tr><th>step</th><th class="right">prefill tokens</th>'
                f'<th class="right">decodes</th><th class="right">took</th></tr>{told}</table>'
            )
        else:
            for chart in (self._rates, self._steps):
                chart.set_content(empty("Nothing computed yet", "Ask something on the Chat page."))
        info = self._service.engine.info
        if info is not None and info is not self._ledger_drawn_for:
            self._ledger.set_content(_ledger_html(info))
            self._ledger_drawn_for = info
        await self._draw_map()

    def _draw_tiles(self, now_s: float) -> None:
        engine = self._service.engine
        stats = engine.stats
        prefill, decode = self._throughput.rate(now_s)
        late = latencies(self._service.stories.recent(_JUDGED_REQUESTS), now_s)
        used = (
            stats.blocks_used / stats.blocks_total * 100 if stats is not None and stats.blocks_total else 0.0
        )
        tiles = (
            ("output", round(decode), "tokens/s"),
            ("prefill", round(prefill), "tokens/s"),
            ("running", stats.running if stats is not None else 0, ""),
            ("waiting", engine.waiting, ""),
            ("fairness", self._service.fairness_index, ""),
            ("first token, median", _ms(late.first_p50_s), "ms"),
            ("first token, p99", _ms(late.first_p99_s), "ms"),
            ("gap, median", _ms(late.gap_p50_s), "ms"),
            ("gap, p99", _ms(late.gap_p99_s), "ms"),
            ("KV blocks in use", used, "%"),
            ("evictions", stats.evictions if stats is not None else 0, ""),
        )
        self._tiles.set_content("".join(tile(*one) for one in tiles))

    async def _draw_map(self) -> None:
        """Asks the engine only when a step has passed since: an idle engine is left alone."""
        engine = self._service.engine
        if engine.state != "ready" or engine.stats is None:
            return
        mark = (engine.engine_pid, engine.stats.steps, engine.stats.running)
        if mark == self._map_mark:
            return
        asked: asyncio.Task[BlockMap] = asyncio.create_task(engine.block_map())
        # Waited for this way because an engine that dies meanwhile cancels the answer, not this page.
        await asyncio.wait([asked], timeout=_MAP_PATIENCE_S)
        if not asked.done():
            asked.cancel()
        elif not asked.cancelled():
            self._map_mark = mark
            self._map.set_content(block_chart(asked.result(), self._may_see))

    def _may_see(self, request_id: str) -> bool:
        record = self._service.stories.get(request_id)
        return self._visitor.key is None or (record is not None and self._visitor.may_see(record.caller))


def _card(title: str) -> ui.html:
    with ui.element("div").classes("card"):
        show(f"<h2>{escape(title)}</h2>")
        return show("")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _ledger_html(info: Ready) -> str:
    rows = "".join(
        f'<tr><td>{escape(row["name"])}</td><td class="right num">{format_bytes(row["predicted_bytes"])}</td>'
        f'<td class="right num">{_measured(row["measured_bytes"])}</td>'
        f'<td class="right num">{_ratio(row["predicted_bytes"], row["measured_bytes"])}</td>'
        f'<td class="soft small wide-only">{escape(row["how"])}</td></tr>'
        for row in info.ledger["rows"]
    )
    total = info.ledger
    return (
        '<table class="plain"><tr><th>part</th><th class="right">predicted</th><th class="right">measured</th>'
        f'<th class="right">ratio</th><th class="wide-only">how</th></tr>{rows}<tr><td><b>total</b></td>'
        f'<td class="right num"><b>{format_bytes(total["predicted_bytes"])}</b></td>'
        f'<td class="right num"><b>{_measured(total["measured_bytes"])}</b></td><td></td>'
        f'<td class="soft small wide-only">of {format_bytes(total["available_bytes"])} that were available</td>'
        "</tr></table>"
    )


def _measured(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)


def _ratio(predicted: int, measured: int | None) -> str:
    return "–" if measured is None or not predicted else f"{measured / predicted:.2f}"
