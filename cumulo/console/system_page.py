"""The system page: which model, where it runs, what versions, how it is configured."""

import dataclasses
import platform
import time
from html import escape
from typing import Any

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo import __version__
from cumulo.base.quantities import quantity
from cumulo.base.report import available_cores, package_version
from cumulo.console.chat.settings import effective
from cumulo.console.front import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.console.values import actions, duration, table
from cumulo.engine.config import EngineConfig
from cumulo.engine.memory.ledger import format_bytes
from cumulo.serve.adapter_registry import ServedAdapter
from cumulo.serve.engine_link.messages import Ready
from cumulo.serve.options import ServeOptions
from cumulo.serve.service import Service
from cumulo.spec.slo import Slo

_PACKAGES = ("torch", "numpy", "tokenizers", "fastapi", "uvicorn", "msgspec", "llguidance", "nicegui")


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/system", title="System · Cumulo")
    def system(request: Request) -> None:
        with shell.page(request, "/system") as visitor:
            top, versions = show("", "flow"), _card("Versions", _versions())
            middle = show("", "pair")
            adapters = AdaptersCard(shell, visitor)

            def tick() -> None:
                service = shell.service
                top.set_content(
                    _card("Model", _model(service)) + _card("Server", _server(service)) + versions
                )
                info = service.engine.info
                engine = engine_rows(service.options.engine, info) if info is not None else []
                middle.set_content(_halves("Engine options", engine))
                adapters.draw()

            shell.clock(visitor, 5.0, tick)
            options = server_rows(shell.service.options, shell.service.model_name)
            show(_halves("Server options", options), "pair")
            show(
                "The command <code>cumulo serve --help</code> explains every option. · "
                '<a href="/docs">API description</a> · <a href="/metrics">Prometheus metrics</a> · '
                '<a href="/health">health</a>',
                "small soft",
            )


def _model(service: Service) -> list[tuple[str, Any]]:
    info = service.engine.info
    if info is None:
        return []
    sampling = effective(info.generation_defaults).items()
    return [
        ("name", service.model_name),
        ("loaded from", info.model_name),
        ("max context", f"{info.max_context:,} tokens"),
        ("vocabulary", f"{info.vocab_size:,} tokens"),
        ("computed by", info.runs_on),
        ("KV cache", f"{info.kv_blocks:,} blocks of {info.block_size} tokens"),
        ("batch", f"at most {info.max_running:,} sequences and {info.max_tokens_per_step:,} tokens per step"),
        *_tiers(service),
        ("default sampling", ", ".join(f"{n} {v}" for n, v in sampling if n not in ("max_tokens", "seed"))),
    ]


def _tiers(service: Service) -> list[tuple[str, Any]]:
    """KV blocks beyond the device, where there are any."""
    stats = service.engine.stats
    tiers = stats.tiers if stats is not None else None
    if tiers is None:
        return []
    used = f"{tiers.host_blocks_used:,} of {tiers.host_blocks:,} blocks"
    rows = [("KV tier: host memory", f"{used}; {tiers.counts.host_hit_tokens:,} tokens fetched")]
    if (config := service.options.engine).kv_disk:
        held = f"{tiers.disk_blocks:,} blocks, {format_bytes(tiers.disk_bytes)} of {config.kv_disk_gib:g} GiB"
        fetched = f"{tiers.counts.disk_hit_tokens:,} tokens fetched"
        rows.append(("KV tier: disk", f"{held} in {config.kv_disk}; {fetched}"))
    return rows


def _server(service: Service) -> list[tuple[str, Any]]:
    engine = service.engine
    rows = [
        ("engine", "draining" if service.draining else engine.state),
        ("uptime", duration(time.time() - service.started_s)),
        ("engine restarts", engine.restarts),
        ("API keys", "required" if service.keys is not None else "not required"),
        ("machine", f"{platform.machine()}, {platform.system()} {platform.release()}"),
    ]
    if service.options.engine.speculate:
        drafted, accepted = service.metrics.drafted_tokens, service.metrics.accepted_tokens
        share = f" ({accepted / drafted:.0%})" if drafted else ""
        rows.append(("speculation", f"{accepted:,} of {drafted:,} drafted tokens accepted{share}"))
    if engine.last_failure:
        rows.append(("last failure", engine.last_failure))
    return rows


def _versions() -> list[tuple[str, Any]]:
    packages = [(name, package_version(name) or "not installed") for name in _PACKAGES]
    return [("cumulo", __version__), ("python", platform.python_version()), *packages]


def _halves(title: str, rows: list[tuple[str, Any]]) -> str:
    """A long list as two cards next to each other."""
    half = -(-len(rows) // 2)
    return _card(title, rows[:half]) + (_card(f"{title}, continued", rows[half:]) if rows[half:] else "")


def _card(title: str, rows: list[tuple[str, Any]]) -> str:
    if not rows:
        return f'<div class="card"><h2>{title}</h2>{empty("Loading the model", "This takes a moment.")}</div>'
    cells = "".join(
        f'<tr><td class="soft">{escape(name)}</td><td class="num small">{escape(str(value))}</td></tr>'
        for name, value in rows
    )
    return f'<div class="card"><h2>{title}</h2><table class="plain">{cells}</table></div>'


_COLUMNS = (
    ("adapter", "small", "What requests call it, as their model."),
    ("rank", "small", "Rank of its matrices."),
    ("folder", "small", "Where the server read it."),
    ("running", "small", "Requests that use it now."),
    ("requests", "small", "Requests that were answered with it."),
    ("state", "small", "loading, loaded, finishing its last requests, or lost."),
)
_NO_ROOM = (
    "Start the server with --lora NAME=DIR or --max-loras 8 to serve low-rank adapters next to the model."
)
_NONE = "Load one below, or with POST /v1/load_lora_adapter. Requests name it as their model."


def adapters_html(adapters: list[ServedAdapter], most: int, may_operate: bool) -> str:
    title = f"<h2>Adapters ({len(adapters)} of {most})</h2>"
    if not adapters:
        return title + empty("No adapter is loaded", _NONE if most else _NO_ROOM)
    columns = (*_COLUMNS, ("", "actions", "")) if may_operate else _COLUMNS
    return title + table(columns, [_row(one)[: len(columns)] for one in adapters], "fleet")


def _row(adapter: ServedAdapter) -> list[str]:
    state = "finishing its last requests" if adapter.dropped else "loaded" if adapter.ready else "loading"
    if adapter.error:
        state = f"lost: {escape(adapter.error)}"
    may_drop = adapter.ready and not adapter.dropped
    return [
        escape(adapter.name),
        f"{adapter.rank or ''}",
        escape(adapter.folder),
        f"{adapter.calls}",
        f"{adapter.answered:,}",
        state,
        actions("adapter", ("drop",) if may_drop else (), adapter.name),
    ]


class AdaptersCard:
    def __init__(self, shell: Shell, visitor: Visitor) -> None:
        self._shell, self._visitor = shell, visitor
        self._table = show("", "card")
        if visitor.may_operate and shell.service.adapters.most:
            with ui.element("div").classes("filters"):
                self._name = ui.input("Name").props("outlined dense")
                self._name.tooltip("What requests call the adapter, as their model.")
                self._folder = ui.input("Folder on the server").props("outlined dense")
                self._folder.tooltip("A folder in PEFT's layout, as `cumulo train` and peft write it.")
                button = ui.button("Load adapter", icon="add", on_click=self._load)
                button.props("flat dense no-caps").classes("quiet")
        ui.on("adapter", lambda event: self._drop(str(event.args[1])))
        self.draw()

    def draw(self) -> None:
        registry = self._shell.service.adapters
        self._table.set_content(
            adapters_html(list(registry.all.values()), registry.most, self._visitor.may_operate)
        )

    async def _load(self) -> None:
        name, folder = str(self._name.value or "").strip(), str(self._folder.value or "").strip()

        async def act() -> str:
            await self._shell.service.load_adapter(name, folder)
            self._name.set_value("")
            self._folder.set_value("")
            return f"{name} is loaded"

        await self._shell.operate(self._visitor, act)
        self.draw()

    async def _drop(self, name: str) -> None:
        def act() -> str:
            adapter = self._shell.service.adapters.drop(name)
            waits = f"; {adapter.calls} requests are answered first" if adapter.calls else ""
            return f"{name} is dropped{waits}"

        await self._shell.operate(self._visitor, act)
        self.draw()


Rows = list[tuple[str, str]]

_UNSET = {  # what None means, option by option
    "model": "the built-in model",
    "chat_template": "the model's own template",
    "requests_per_minute": "no limit",
    "tokens_per_minute": "no limit",
    "otlp_endpoint": "no traces are sent",
    "files": "a temporary folder",
}
_HIDDEN = ("engine", "api_keys", "seed", "fleet_key", "transfer_key")  # keys are nobody's to read


def server_rows(options: ServeOptions, model_name: str) -> Rows:
    derived: dict[str, Any] = {
        "name": model_name,
        "max_connections_per_address": options.max_connections // 2,
        "default_max_tokens": options.chat_limit,
    }
    return [
        (field.name, shown(field.name, derived.get(field.name) if value is None else value))
        for field in dataclasses.fields(options)
        if field.name not in _HIDDEN
        for value in [getattr(options, field.name)]
    ]


def engine_rows(config: EngineConfig, info: Ready) -> Rows:
    """What was left to the engine is shown as the engine decided it."""
    on_gpu = "GPU kernels on" in info.runs_on or "PyTorch operators on" in info.runs_on
    settled = config.settled("cuda" if on_gpu else "cpu")
    known: dict[str, Any] = {
        "block_size": f"{info.block_size} tokens",
        "kv_blocks": info.kv_blocks,
        "max_context": f"{info.max_context:,} tokens",
        "max_running": f"{info.max_running:,} sequences",
        "max_tokens_per_step": info.max_tokens_per_step,
        "threads": config.threads or f"all cores ({available_cores()})",
        "kv_memory_gib": config.kv_memory_gib or _kv_memory(info),
        "weights": "as the model's file has them" if config.weights == "auto" else config.weights,
        "kv_dtype": settled.dtype if config.kv_dtype == "auto" else config.kv_dtype,
        "rank_backend": _rank_backend(config, info, on_gpu),
        "cuda_graphs": settled.cuda_graphs if on_gpu else "no GPU is used",
    }
    return [
        (field.name, shown(field.name, known.get(field.name, getattr(settled, field.name))))
        for field in dataclasses.fields(settled)
        if field.name not in _HIDDEN
    ]


def _kv_memory(info: Ready) -> str:
    held = [row["predicted_bytes"] for row in info.ledger["rows"] if row["name"].lower().startswith("kv")]
    return f"{format_bytes(sum(held))}, chosen from what was free" if held else "chosen from what was free"


def _rank_backend(config: EngineConfig, info: Ready, on_gpu: bool) -> str:
    if config.rank_backend != "auto":
        return config.rank_backend
    if config.layout.world == 1:
        return "one rank exchanges nothing"
    _, _, told = info.runs_on.partition(
        "ranks exchange numbers by "
    )  # and why, where it is not the usual one
    return told or ("symmetric" if on_gpu else "gloo")


def shown(name: str, value: Any) -> str:
    """A value with its unit, for people."""
    if value is None:
        return _UNSET.get(name, "none")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, str):
        return value or "none"
    if isinstance(value, Slo):  # promised to every request, not to a share of them
        return ", ".join(f"{bound.upper()} {quantity(time_s, 's')}" for bound, time_s in value.bounds.items())
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    if name.endswith("_gib"):
        return f"{value:g} GiB"
    if name.endswith("_s"):
        return f"{value:g} s"
    return f"{value:,}" if isinstance(value, int) and name != "port" else str(value)
