"""The live page: throughput, latency, queue and KV cache now and over the last hour; use of the machine."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.base.quantiles import percentile
from cumulo.console.charts import TimeChart, block_chart
from cumulo.console.front import Visitor
from cumulo.console.machine_use import MachineUse, UseSample
from cumulo.console.shell import Shell, empty, show
from cumulo.console.values import heading, table, tile
from cumulo.engine.memory.ledger import format_bytes
from cumulo.serve.engine_link.messages import Ready, StepRecord
from cumulo.serve.observe.step_history import StepHistory
from cumulo.serve.observe.stories import Record

JUDGED_S = 300.0  # percentiles are of requests not older than this
_RATE_S = 5  # the present rate is the mean of so many seconds
_MOST_GAPS = 256  # per request


@dataclass(frozen=True, slots=True)
class Window:
    """How much of the past a chart shows, and in how many slices of how many seconds."""

    label: str
    slices: int
    slice_s: int

    @property
    def length_s(self) -> float:
        return self.slices * self.slice_s


WINDOWS = (Window("1 min", 60, 1), Window("10 min", 60, 10), Window("1 hour", 120, 30))


def rates(history: StepHistory, now_s: float) -> tuple[float, float]:
    """Prefill and decode tokens per second just now."""
    last = history.last(now_s, _RATE_S)
    return (
        sum(part.prefill_tokens for part in last) / _RATE_S,
        sum(part.decode_tokens for part in last) / _RATE_S,
    )


def machine_line(
    samples: Sequence[UseSample], values: Sequence[float | None], window: Window, now_s: float
) -> list[float | None]:
    """One value per slice of a window: the last sample in it; where a slice has none, the one before goes on."""
    points: list[float | None] = [None] * window.slices
    start_s = now_s - window.length_s
    for sample, value in zip(samples, values, strict=True):
        index = int((sample.time_s - start_s) / window.slice_s)
        if 0 <= index < window.slices:
            points[index] = value
    for index in range(1, window.slices):
        if points[index] is None:
            points[index] = points[index - 1]
    return points


@dataclass(frozen=True, slots=True)
class Latencies:
    requests: int
    first_p50_s: float | None
    first_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    preemptions: int


def latencies(records: Iterable[Record], now_s: float) -> Latencies:
    """The latencies of the requests that were received within the last minutes."""
    firsts: list[float] = []
    gaps: list[float] = []
    count = preemptions = 0
    for record in records:
        if record.received_s < now_s - JUDGED_S:
            continue
        count += 1
        if record.story is not None:
            preemptions += record.story.preemptions
            if record.ttft_s is not None:
                firsts.append(record.ttft_s)
        if record.samples == 1:
            times = record.token_times_s[-_MOST_GAPS:]
            gaps.extend(later - earlier for earlier, later in pairwise(times))
    return Latencies(
        count,
        percentile(firsts, 0.5),
        percentile(firsts, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        preemptions,
    )


_REFRESH_S = 1.0
_STEPS_SHOWN = 96
_JUDGED_REQUESTS = 64
_FAIRNESS = (
    "How evenly API keys were served in the last minute, by Jain's index: 1 is even, 1/n means that one of n keys "
    "got everything."
)
_RESIDENT = (
    "Resident memory of the engine's process: less than the ledger's total while KV blocks are unused."
)
_LEDGER_TOLD = (
    "Allocated is what the engine has reserved. On a CPU the system gives memory to a block of the KV cache when "
    "it is first used, so the engine's RSS may be far less."
)
_EVICTIONS = "Cached prefixes that were dropped to make room for new blocks."


_CHARTS = (  # title, tooltip, unit, least end of the scale, its fixed end
    ("Decode throughput, tokens/s", "Output tokens computed per second.", "tokens/s", 10, None),
    ("Prefill throughput, tokens/s", "Prompt tokens computed per second.", "tokens/s", 10, None),
    ("Running and queued, sequences", "Sequences that the engine computes, and those that wait for a place.",
     "sequences", 4, None),
    ("CPU, memory and GPU use, %", "Of the whole machine that runs the server.", "%", 100, 100),
    (f"Time of the last {_STEPS_SHOWN} steps, ms",
     "A step computes one token of every running sequence and a part of the waiting prompts.", "ms", 10, None),
)  # fmt: skip


def register(shell: Shell, app: FastAPI, machine: MachineUse) -> None:
    @ui.page("/live", title="Live · Cumulo")
    def live(request: Request) -> None:
        with shell.page(request, "/live") as visitor:
            page = _Live(shell, visitor, machine)
            shell.clock(visitor, _REFRESH_S, page.tick)


class _Live:
    def __init__(self, shell: Shell, visitor: Visitor, machine: MachineUse) -> None:
        self._shell, self._visitor, self._machine = shell, visitor, machine
        self._service = shell.service
        self._map_mark: object = None  # what the block map drawn last belonged to
        self._tiles = show("", "tiles six")
        with ui.element("div").classes("filters"):
            self._window = ui.toggle(
                {number: window.label for number, window in enumerate(WINDOWS)},
                value=0,
                on_change=self._draw_history,
            ).props("unelevated dense no-caps toggle-color=primary padding='4px 10px'")
            self._span = ui.label("").classes("soft small")
        with ui.element("div").classes("pair"):
            charts = (TimeChart(*one) for one in _CHARTS)
            self._decode, self._prefill, self._requests, self._busy, self._steps = charts
            self._map = _card("KV cache blocks", "Which request holds which block of the KV cache.")
        self._machine_tiles = show("", "tiles")
        self._ledger = _card(
            "Memory ledger", "What was predicted before loading, and what was allocated after."
        )
        self._map.set_content(empty("Nothing to show yet", "The map appears when the engine runs."))
        self._ledger_drawn_for: Ready | None = None

    async def tick(self) -> None:
        self._draw_tiles(time.perf_counter())
        self._draw_history()
        self._draw_steps(list(self._service.recent_steps)[-_STEPS_SHOWN:])
        info = self._service.engine.info
        if info is not None and info is not self._ledger_drawn_for:
            self._ledger.set_content(ledger_html(info))
            self._ledger_drawn_for = info
        await self._draw_map()

    def _draw_tiles(self, now_s: float) -> None:
        engine, stats = self._service.engine, self._service.engine.stats
        prefill, decode = rates(self._service.step_history, now_s)
        late = latencies(self._service.stories.recent(_JUDGED_REQUESTS), now_s)
        used = (
            100 * stats.blocks_used / stats.blocks_total if stats is not None and stats.blocks_total else 0.0
        )
        recent = f"of the last {late.requests} requests, at most 5 minutes old"
        tiles = (
            ("Decode", round(decode), "tokens/s", "Output tokens per second, mean of the last 5 s."),
            ("Prefill", round(prefill), "tokens/s", "Prompt tokens per second, mean of the last 5 s."),
            ("Running", stats.running if stats is not None else 0, "", "Sequences that the engine computes now."),
            ("Queue", engine.waiting, "", "Requests that wait for a place in the engine."),
            ("KV cache usage", used, "%", "Share of the KV cache's blocks that running requests hold."),
            ("Preemptions", late.preemptions, "", f"Times that requests gave up their KV blocks, {recent}."),
            ("TTFT p50", _ms(late.first_p50_s), "ms", f"Time to first token: median {recent}."),
            ("TTFT p99", _ms(late.first_p99_s), "ms", f"Time to first token: 99th percentile {recent}."),
            ("ITL p50", _ms(late.gap_p50_s), "ms", f"Inter-token latency: median gap between tokens {recent}."),
            ("ITL p99", _ms(late.gap_p99_s), "ms", f"Inter-token latency: 99th percentile {recent}."),
            ("Fairness index", self._service.fairness_index, "", _FAIRNESS),
            ("Cache evictions", stats.evictions if stats is not None else 0, "", _EVICTIONS),
        )  # fmt: skip
        self._tiles.set_content("".join(tile(*one) for one in tiles))

    def _draw_history(self) -> None:
        now_s, window = time.perf_counter(), WINDOWS[int(self._window.value or 0)]
        parts = self._service.step_history.last(now_s, window.slices, window.slice_s)
        ends = (f"{window.label} ago", "now")
        self._span.set_text(f"one column is {window.slice_s:g} s")
        for card, ink, tokens in (
            (self._decode, "decode", [part.decode_tokens for part in parts]),
            (self._prefill, "prefill", [part.prefill_tokens for part in parts]),
        ):
            card.columns([count / window.slice_s for count in tokens], ends, ink)
        running = ("running", "decode", [float(part.running) for part in parts])
        queued = ("queued", "prefill", [float(part.waiting) for part in parts])
        self._requests.lines((running, queued), ends)
        self._draw_machine(now_s, window, ends)

    def _draw_machine(self, now_s: float, window: Window, ends: tuple[str, str]) -> None:
        samples = list(self._machine.samples)
        if not samples:
            self._busy.below.set_content(
                empty("Not known yet", "It is sampled every few seconds; it needs the package psutil.")
            )
            return
        self._busy.below.set_content("")
        lines = [
            ("CPU", "decode", [s.cpu_percent for s in samples]),
            ("memory", "2", [s.memory_percent for s in samples]),
        ]
        last = samples[-1]
        total = format_bytes(last.memory_total_bytes)
        tiles = [
            ("CPU use", last.cpu_percent, "%", "Share of all cores' time that was busy in the last 5 s."),
            ("Memory in use", *_gib(last.memory_used_bytes), f"Of {total}, by all processes."),
            ("Engine RSS", *_gib(last.engine_bytes), _RESIDENT),
            ("API server RSS", *_gib(last.server_bytes), "Resident memory of the server process."),
        ]  # fmt: skip
        for number, gpu in enumerate(last.gpus):
            name = "GPU" if len(last.gpus) == 1 else f"GPU {number}"
            busy = [
                float(s.gpus[number].utilization_percent) if number < len(s.gpus) else 0.0 for s in samples
            ]
            lines.append((name, str((number + 3) % 8), busy))
            whole = f"Of {format_bytes(gpu.total_bytes)}, by all processes."
            tiles += [
                (f"{name} use", float(gpu.utilization_percent), "%", "Share of time in which a kernel ran."),
                (f"{name} memory", *_gib(gpu.used_bytes), whole),
            ]
        drawn = [(name, ink, machine_line(samples, values, window, now_s)) for name, ink, values in lines]
        self._busy.lines(drawn, ends)
        self._machine_tiles.classes(replace=f"tiles {'six' if len(tiles) == 6 else 'four'}")
        self._machine_tiles.set_content("".join(tile(*one) for one in tiles))

    def _draw_steps(self, steps: list[StepRecord]) -> None:
        if not steps:
            self._steps.below.set_content(empty("Nothing computed yet", "Ask something on the Chat page."))
            return
        times_ms = [(step.finished_s - step.started_s) * 1e3 for step in steps]
        tips = [
            f"step {step.index}: {step.prefill_tokens} prefill and {step.decode_tokens} decode tokens"
            for step in steps
        ]
        last = steps[-1]
        self._steps.columns(times_ms, ("", ""), "decode", tips)
        told = (
            f"Steps {steps[0].index:,} to {last.index:,}. Last step: {times_ms[-1]:.1f} ms for "
            f"{last.prefill_tokens:,} prefill and {last.decode_tokens:,} decode tokens. Rest the pointer on a step "
            "to see its figures."
        )
        self._steps.below.set_content(f'<p class="soft small told">{told}</p>')

    async def _draw_map(self) -> None:
        """Asks the engine only when a step has passed since: an idle engine is left alone."""
        engine = self._service.engine
        if engine.state != "ready" or engine.stats is None:
            return
        mark = (engine.engine_pids, engine.stats.steps, engine.stats.running)
        if mark == self._map_mark:
            return
        blocks = await self._shell.block_map()
        if blocks is not None:
            self._map_mark = mark
            self._map.set_content(block_chart(blocks, self._may_see))

    def _may_see(self, request_id: str) -> bool:
        record = self._service.stories.get(request_id)
        return self._visitor.key is None or (record is not None and self._visitor.may_see(record.caller))


def _card(title: str, explained: str) -> ui.html:
    with ui.element("div").classes("card"):
        show(heading(title, explained))
        return show("")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _gib(count: int | None) -> tuple[str | None, str]:
    """A number of bytes and its unit."""
    if count is None:
        return None, ""
    number, unit = format_bytes(count).split(" ")
    return number, unit


_LEDGER = (
    ("part", "", ""),
    ("predicted", "right", ""),
    ("allocated", "right", "Measured after loading."),
    ("ratio", "right", "allocated / predicted"),
    ("prediction", "soft small wide-only", ""),
)


def ledger_html(info: Ready) -> str:
    rows = [
        [
            escape(row["name"].replace("kv cache", "KV cache")),
            format_bytes(row["predicted_bytes"]),
            _measured(row["measured_bytes"]),
            _ratio(row["predicted_bytes"], row["measured_bytes"]),
            escape(row["how"]),
        ]
        for row in info.ledger["rows"]
    ]
    total = info.ledger
    sums = (format_bytes(total["predicted_bytes"]), _measured(total["measured_bytes"]))
    available = f"of {format_bytes(total['available_bytes'])} available"
    last = ["<b>total</b>", *(f"<b>{one}</b>" for one in sums), "", available]
    return table(_LEDGER, [*rows, last]) + f'<p class="soft small told">{_LEDGER_TOLD}</p>'


def _measured(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)


def _ratio(predicted: int, measured: int | None) -> str:
    return "–" if measured is None or not predicted else f"{measured / predicted:.2f}"
