"""The system page: which model, where it runs, what versions, how it is configured."""

import platform
import time
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo import __version__
from cumulo.console.knobs import effective
from cumulo.console.resolved_options import engine_rows, server_rows
from cumulo.console.shell import Shell, empty, show
from cumulo.console.system.adapters_card import AdaptersCard
from cumulo.console.words import duration
from cumulo.engine.memory.ledger import format_bytes
from cumulo.serve.service import Service

_PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "fastapi",
    "uvicorn",
    "msgspec",
    "llguidance",
    "nicegui",
)


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/system", title="System · Cumulo")
    def system(request: Request) -> None:
        with shell.page(request, "/system") as visitor:
            top, versions = show("", "flow"), _card("Versions", _versions())
            middle = show("", "pair")
            adapters = AdaptersCard(shell, visitor)

            async def tick() -> None:
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
    return [
        ("name", service.model_name),
        ("loaded from", info.model_name),
        ("max context", f"{info.max_context:,} tokens"),
        ("vocabulary", f"{info.vocab_size:,} tokens"),
        ("computed by", info.runs_on),
        ("KV cache", f"{info.kv_blocks:,} blocks of {info.block_size} tokens"),
        ("batch", f"at most {info.max_running:,} sequences and {info.max_tokens_per_step:,} tokens per step"),
        *_tiers(service),
        (
            "default sampling",
            ", ".join(
                f"{name} {value}"
                for name, value in effective(info.generation_defaults).items()
                if name not in ("max_tokens", "seed")
            ),
        ),
    ]


def _tiers(service: Service) -> list[tuple[str, Any]]:
    """KV blocks beyond the device, where there are any."""
    stats = service.engine.stats
    tiers = stats.tiers if stats is not None else None
    if tiers is None:
        return []
    rows = [
        (
            "KV tier: host memory",
            f"{tiers.host_blocks_used:,} of {tiers.host_blocks:,} blocks; {tiers.host_hit_tokens:,} tokens fetched",
        )
    ]
    if service.options.engine.kv_disk:
        config = service.options.engine
        rows.append(
            (
                "KV tier: disk",
                f"{tiers.disk_blocks:,} blocks, {format_bytes(tiers.disk_bytes)} of {config.kv_disk_gib:g} GiB in "
                f"{config.kv_disk}; {tiers.disk_hit_tokens:,} tokens fetched",
            )
        )
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
    rows: list[tuple[str, Any]] = [("cumulo", __version__), ("python", platform.python_version())]
    for package in _PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            rows.append((package, "not installed"))
    return rows


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
