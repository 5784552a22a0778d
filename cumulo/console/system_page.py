"""The system page: which model, where it runs, what versions, how it is configured."""

import dataclasses
import platform
import time
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo import __version__
from cumulo.console.shell import Shell, empty, show
from cumulo.console.words import duration
from cumulo.engine.config import EngineConfig
from cumulo.serve.options import ServeOptions
from cumulo.serve.service import Service

_PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "llguidance",
    "nicegui",
)

_AUTO = ("block_size", "max_running", "max_tokens_per_step")  # whose 0 is the device's default


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/system", title="System · Cumulo")
    def system(request: Request) -> None:
        with shell.page(request, "/system") as visitor:
            top = show("", "pair")

            async def tick() -> None:
                content = _card("Model", _model(shell.service)) + _card("Server", _server(shell.service))
                top.set_content(content)

            shell.clock(visitor, 5.0, tick)
            show(
                _card("Versions", _versions()) + _card("Engine", _options(shell.service.options.engine)),
                "pair",
            )
            show(_card("Options", _options(shell.service.options)))
            show(
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
        ("made of", info.model_name),
        ("context", f"{info.max_context:,} tokens"),
        ("vocabulary", f"{info.vocab_size:,} tokens"),
        ("runs on", info.runs_on),
        ("KV cache", f"{info.kv_blocks:,} blocks of {info.block_size} tokens"),
        ("at once", f"{info.max_running:,} sequences, {info.max_tokens_per_step:,} tokens a step"),
        (
            "recommended sampling",
            ", ".join(f"{k} {v}" for k, v in info.generation_defaults.items()) or "none",
        ),
    ]


def _server(service: Service) -> list[tuple[str, Any]]:
    engine = service.engine
    rows = [
        ("engine", "draining" if service.draining else engine.state),
        ("up for", duration(time.time() - service.started_s)),
        ("engine restarts", engine.restarts),
        ("API keys", "asked for" if service.keys is not None else "not asked for"),
        ("machine", f"{platform.machine()}, {platform.system()} {platform.release()}"),
    ]
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


def _options(options: ServeOptions | EngineConfig) -> list[tuple[str, Any]]:
    """Every option and its value; what is not set was left to the engine or has no limit. What the engine chose
    for "auto" the card of the model says."""
    return [
        (field.name, "not set" if value is None else "auto" if value == 0 and field.name in _AUTO else value)
        for field in dataclasses.fields(options)
        if field.name not in ("engine", "api_keys", "seed")
        for value in [getattr(options, field.name)]
    ]


def _card(title: str, rows: list[tuple[str, Any]]) -> str:
    if not rows:
        return f'<div class="card"><h2>{title}</h2>{empty("Loading the model", "This takes a moment.")}</div>'
    cells = "".join(
        f'<tr><td class="soft">{escape(name)}</td><td class="num small">{escape(_text(value))}</td></tr>'
        for name, value in rows
    )
    return f'<div class="card"><h2>{title}</h2><table class="plain">{cells}</table></div>'


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
