"""`cumulo serve`: an OpenAI-compatible server for one model."""

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cumulo.base.report import available_cores
from cumulo.cli.shared.declare import takes_options, typed_flags
from cumulo.cli.shared.serve_options import ServeCommandOptions
from cumulo.cli.shared.terminal import note
from cumulo.errors import CumuloError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from cumulo.plan.serve.plan_file import ServePlanFile
    from cumulo.serve.engine_link.messages import Ready
    from cumulo.serve.options import ServeOptions

T = TypeVar("T")
_OF_A_RANK = ("model", "rank_of", "rank_count", "fleet_key_file", "threads")  # its engine says all else
_OF_ONE_MODEL = {  # options of deployments that serve one model
    "replicas", "autoscale", "prefill", "decode", "role", "tp", "pp", "dp", "ep", "speculate", "remote_ranks",
}  # fmt: skip
EXAMPLE = (
    "Example: [bold]cumulo serve --port 8000[/bold], then point any OpenAI client at http://127.0.0.1:8000/v1"
)


@takes_options
def serve(chosen: ServeCommandOptions) -> None:
    """Serve a model with an OpenAI-compatible API. /docs lists all endpoints."""
    if chosen.new_api_key is not None:
        _make_key(chosen.new_api_key, chosen)
        return
    _check(chosen)
    if chosen.rank_of:
        _be_rank(chosen)
        return
    if chosen.plan is not None:
        chosen = with_plan(chosen, chosen.plan)
    if (
        chosen.replicas == 1
        and not chosen.prefill
        and not chosen.autoscale
        and "cumulo.serve.server" not in sys.modules
    ):
        from cumulo.serve.engine_link import early_start

        early_start.begin()  # its imports take as long as this process's
    try:
        from cumulo.serve.server import run
    except ImportError as error:
        raise CumuloError(
            f"the server needs packages that are not installed ({error.name}): "
            "pip install -e '.[serve]' in Cumulo's folder"
        ) from error
    from cumulo.serve import stderr_log

    stderr_log.install()  # before the first note: one that cannot be written must not end the server
    served = _served(chosen)
    extend = _console() if chosen.console else None
    address = ""

    def on_listening(url: str) -> None:
        nonlocal address
        address = url
        note(f"listening on {url}; loading the model")

    def on_ready(info: "Ready") -> None:
        _announce(info, address, served, extend is not None, chosen)

    run(served, on_listening=on_listening, on_ready=on_ready, extend=extend)


def _check(chosen: ServeCommandOptions) -> None:
    """Refuse options that are wrong whatever the model is."""
    if chosen.cache_group is not None:
        raise CumuloError("--cache-group applies to a new key: add --new-api-key NAME")
    if chosen.operator:
        raise CumuloError("--operator applies to a new key: add --new-api-key NAME")
    chosen.web.fields()  # refuses a wrong --log-level
    chosen.promise.config()  # refuses what it cannot promise
    if chosen.lora:
        _check_loras(chosen)


def _check_loras(chosen: ServeCommandOptions) -> None:
    """Limits that were asked for hold; those that were not follow the adapters."""
    from cumulo.models.adapters.config import greatest_rank
    from cumulo.serve.adapter_registry import named_loras

    if chosen.max_loras == 0:
        raise CumuloError("--max-loras 0 leaves no place for the adapters of --lora: omit one of the two")
    for name, folder in named_loras(chosen.lora or ()).items():
        rank = greatest_rank(Path(folder))
        if chosen.max_lora_rank is not None and rank > chosen.max_lora_rank:
            raise CumuloError(
                f"--max-lora-rank {chosen.max_lora_rank} is less than the rank of {name}, {rank}"
            )


def _served(chosen: ServeCommandOptions) -> "ServeOptions":
    """The options of the command as the server takes them."""
    from cumulo.fleet.wire import fleet_key
    from cumulo.serve.options import ServeOptions

    shared_step_s = None if chosen.shared_step_ms is None else chosen.shared_step_ms / 1e3
    key = fleet_key(chosen.fleet_key_file)
    told = {
        **vars(chosen),
        **chosen.web.fields(),
        "engine": chosen.engine.config(
            max_loras=chosen.max_loras,
            max_lora_rank=chosen.max_lora_rank,
            shared_step_s=shared_step_s,
            **vars(chosen.steps),
            **chosen.promise.config(),
            **chosen.tiers.config(),
            **_role(chosen, key),
        ),
        "lora": tuple(chosen.lora or ()),
        "models": _models(chosen),
        "replicas": chosen.decode or chosen.replicas,
        "max_file_bytes": int(chosen.max_file_mib * (1 << 20)),
        "files_per_key_bytes": int(chosen.max_files_mib * (1 << 20)),
        "files_bytes": int(chosen.max_all_files_mib * (1 << 20)),
        "fleet_key": key,
        "otlp_endpoint": chosen.otlp_endpoint or _standard_otlp_endpoint(),
    }
    return ServeOptions(**{one.name: told[one.name] for one in fields(ServeOptions) if one.name in told})


def _models(chosen: ServeCommandOptions) -> tuple[str, ...]:
    """The models that are served next to the first: without a MODEL all that were pulled, also later, where the
    deployment can have several."""
    from cumulo.serve.options import ALL_PULLED

    if chosen.models is not None:
        return tuple(one for one in chosen.models if one != "none")
    plain = not typed_flags().keys() & _OF_ONE_MODEL and chosen.plan is None
    return (ALL_PULLED,) if chosen.model is None and plain else ()


def _announce(
    info: "Ready", address: str, served: "ServeOptions", console: bool, chosen: ServeCommandOptions
) -> None:
    """Say that the server is ready, and where."""
    from cumulo.serve.adapter_registry import named_loras

    if served.models not in ((), ("pulled",)):
        note("further models are loaded when a request names them: GET /v1/models lists all")
    note(f"{info.model_name} is ready at {address}/v1 (context {info.max_context:,}; {info.runs_on})")
    if served.lora:
        note(f"adapters: {', '.join(named_loras(served.lora))}")
    if console:
        note(f"the console is at {address}/")
        if chosen.open_browser:
            _open(address)
    elif chosen.console:
        note("the console is not installed; to install it: pip install -e '.[console]' in Cumulo's folder")


def _be_rank(chosen: ServeCommandOptions) -> None:
    """This host has ranks of an engine on another one, until it is interrupted."""
    from cumulo.engine.play.rank_player import serve_ranks
    from cumulo.fleet.wire import fleet_key

    others = [flag for name, flag in typed_flags().items() if name not in _OF_A_RANK]
    if others:
        raise CumuloError(
            f"a rank takes {', '.join(others)} from its engine: give {'it' if len(others) == 1 else 'them'} to "
            f"the server that waits at {chosen.rank_of}; with --rank-of only MODEL, --rank-count, "
            "--fleet-key-file and --threads apply"
        )
    key = fleet_key(chosen.fleet_key_file)
    if key is None:
        raise CumuloError("--rank-of needs the engine's key: add --fleet-key-file FILE")
    note(f"joining the engine at {chosen.rank_of}")
    serve_ranks(chosen.rank_of, key, chosen.model, chosen.engine.threads, chosen.rank_count)


def _role(chosen: ServeCommandOptions, key: str | None) -> dict[str, Any]:
    """The engine's options that say which part of a split deployment it is."""
    if (chosen.prefill > 0) != (chosen.decode > 0):
        raise CumuloError("--prefill and --decode go together: for example --prefill 1 --decode 2")
    if chosen.decode and chosen.replicas != 1:
        raise CumuloError("--decode is the number of replicas: remove --replicas")
    addresses = tuple(chosen.prefill_engine or ())
    over_tcp = [one for one in (chosen.transfer_address, *addresses) if "tcp:" in one]
    if over_tcp and not key:
        raise CumuloError(
            f"engines that are reached over a network ({over_tcp[0]}) need a key: give all of them the same "
            "--fleet-key-file"
        )
    return {
        "role": chosen.role, "transfer_address": chosen.transfer_address, "prefill_engines": addresses,
        "remote_ranks": chosen.remote_ranks, "rank_address": chosen.rank_address,
        "transfer_key": key or "", "transfer_stall_s": chosen.transfer_stall_s,
    }  # fmt: skip


def _standard_otlp_endpoint() -> str | None:
    """OpenTelemetry's own variable. It may be meant for other programs, so what we cannot use is passed over."""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        note(f"OTEL_EXPORTER_OTLP_ENDPOINT is {endpoint!r}, not an http(s) URL: traces are off")
        return None
    try:
        import cumulo.serve.observe.otel  # noqa: F401
    except ImportError:
        note(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but traces are off: they need pip install -e '.[otel]' in "
            "Cumulo's folder"
        )
        return None
    return endpoint


def _open(address: str) -> None:
    """Show the console where there is a screen; a text browser would take over this terminal."""
    import webbrowser

    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)


def _console() -> "Callable[[FastAPI], None] | None":
    """What puts the console into the server's application; None where NiceGUI is not installed."""
    try:
        from cumulo.console.install import install
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "nicegui":
            raise
        return None
    return install


def _make_key(name: str, chosen: ServeCommandOptions) -> None:
    from cumulo.serve.access.keys import new_key

    if chosen.api_keys is None:
        raise CumuloError("--new-api-key needs --api-keys FILE, the file that stores the hash of the key")
    limits = chosen.web.requests_per_minute, chosen.web.tokens_per_minute
    slo = chosen.promise.slo or None
    print(new_key(chosen.api_keys, name, *limits, chosen.cache_group, chosen.operator, slo))
    note(
        f"This is the key of {name}. It is shown only once; {chosen.api_keys} stores its hash. "
        f"Start the server with --api-keys {chosen.api_keys}."
    )


def with_plan(chosen: T, path: Path) -> T:
    """The options with those of the plan filled in; refused where this machine cannot start it."""
    from cumulo.plan.serve.plan_file import read_plan

    plan = read_plan(path)
    filled = _filled(chosen, plan.options())
    _check_places(filled, plan)
    if filled.model is None and plan.planned_for.catalogue_model is not None:  # type: ignore[attr-defined]
        raise CumuloError(
            f"the plan is for {plan.planned_for.catalogue_model} as the catalogue describes it, without weights: "
            f"name a folder, a GGUF file or a Hugging Face model, as in: cumulo serve MODEL --plan {path}"
        )
    note(f"the plan predicts: {plan.planned_for}")
    return filled


def _check_places(filled: Any, plan: "ServePlanFile") -> None:
    from cumulo.base.machine import LEAST_CPU_RANKS, gpus_here
    from cumulo.plan.serve.plan_file import check_places

    engine = filled.engine
    started = dataclasses.replace(
        plan, replicas=filled.replicas, prefill=filled.prefill, decode=filled.decode, tp=engine.tp or 1,
        pp=engine.pp or 1,
    )  # fmt: skip
    if engine.device == "cpu":
        check_places(started, max(available_cores(), LEAST_CPU_RANKS), "CPU cores")
    else:
        check_places(started, len(gpus_here()), "GPUs")


def _filled(chosen: T, told: dict[str, Any]) -> T:
    typed = typed_flags()
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(chosen):  # type: ignore[arg-type]
        value = getattr(chosen, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _filled(value, told)
        elif field.name in told and field.name not in typed:
            changes[field.name] = told[field.name]
    return dataclasses.replace(chosen, **changes)  # type: ignore[type-var]
