"""Options as the system page shows them: every one with the value that applies, never "auto" or "not set"."""

import dataclasses
import os
from typing import Any

from cumulo.base.quantities import quantity
from cumulo.engine.config import EngineConfig
from cumulo.engine.memory.ledger import format_bytes
from cumulo.serve.engine_link.messages import Ready
from cumulo.serve.options import ServeOptions
from cumulo.spec.slo import Slo

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
        "threads": config.threads or f"all cores ({len(_cores())})",
        "kv_memory_gib": config.kv_memory_gib or _kv_memory(info),
        "preemption": _preemption(config),
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


def _cores() -> set[int]:
    """Those that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _kv_memory(info: Ready) -> str:
    held = [row["predicted_bytes"] for row in info.ledger["rows"] if row["name"].lower().startswith("kv")]
    return f"{format_bytes(sum(held))}, chosen from what was free" if held else "chosen from what was free"


def _rank_backend(config: EngineConfig, info: Ready, on_gpu: bool) -> str:
    if config.rank_backend != "auto":
        return config.rank_backend
    if config.layout.world == 1:
        return "one rank exchanges nothing"
    told = info.runs_on.partition("ranks exchange numbers by ")[
        2
    ]  # with its reason, where it is not the usual one
    return told or ("symmetric" if on_gpu else "gloo")


def _preemption(config: EngineConfig) -> str:
    if config.preemption != "auto":
        return config.preemption
    return "recompute or swap, whichever is faster" if config.swap_gib else "recompute"


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
