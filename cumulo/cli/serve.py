"""`cumulo serve`: an OpenAI-compatible server for one model."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cumulo.cli.shared import options
from cumulo.cli.shared.declare import option, takes_options
from cumulo.cli.shared.promise_options import PromiseOptions
from cumulo.cli.shared.tier_options import TierOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

    from cumulo.serve.engine_link.messages import Ready

EXAMPLE = (
    "Example: [bold]cumulo serve --port 8000[/bold], then point any OpenAI client at http://127.0.0.1:8000/v1"
)


@dataclass(frozen=True, kw_only=True)
class ServeCommandOptions:
    model: options.ModelArgument = None
    plan: Path | None = option(
        "Start the deployment of this file, made by `cumulo plan serve --out FILE`. Options that are typed come "
        "before those of the file.",
        None,
        metavar="FILE",
    )
    host: str = option("Address to listen on; 0.0.0.0: all network interfaces.", "127.0.0.1")
    port: int = option("Port to listen on; 0: any free port.", 8000)
    name: str | None = option("Name of the model in the API. Default: the model's own name.", None)
    lora: list[str] | None = option(
        "Serve a low-rank adapter: requests name it as their model. Can be given more than once.",
        None,
        metavar="NAME=DIR",
    )
    max_loras: int | None = option(
        "Maximum number of adapters loaded at the same time, with --lora or POST /v1/load_lora_adapter. Default: 8 "
        "with --lora, otherwise none.",
        None,
    )
    max_lora_rank: int | None = option(
        "Maximum rank of an adapter. Default: 16, or the highest rank among those of --lora.", None
    )
    api_keys: Path | None = option("Require one of the API keys in this file.", None, metavar="FILE")
    fleet_key_file: Path | None = option(
        "File with the key that a gateway shows (cumulo gateway). Default: $CUMULO_FLEET_KEY, or none.",
        None,
        metavar="FILE",
    )
    new_api_key: str | None = option(
        "Create a key, add its hash to --api-keys FILE, print the key and exit.", None, metavar="NAME"
    )
    cache_group: str | None = option(
        "With --new-api-key: keys of the same group share the prefix cache.", None, metavar="NAME"
    )
    operator: bool = option(
        "With --new-api-key: the key can drain, restart, add and remove replicas.", False, "--operator"
    )
    requests_per_minute: int | None = option(
        "Request limit per key; with --new-api-key: limit of the new key.", None
    )
    tokens_per_minute: int | None = option("Token limit per key, for prompts and answers together.", None)
    default_max_tokens: int | None = option(
        "Max tokens of a chat answer if the request does not set max_tokens; 0: the rest of the context. "
        "Default: 4096, and 512 for the built-in model.",
        None,
    )
    replicas: int = option(
        "Number of engine processes, each with its own copy of the model. The streams of one that fails are "
        "continued by another.",
        1,
    )
    autoscale: str = option(
        "Fewest and most replicas between which the load decides, as in 1..4; 0..4 scales to zero. Further "
        "settings follow: 0..4,idle=60s,interval=5s,ttft=1s.",
        "",
        metavar="MIN..MAX",
    )
    router: str = option(
        "With --replicas: which of them gets a request: prefix-aware, least-loaded or round-robin.",
        "prefix-aware",
    )
    prefill: int = option(
        "With --decode: number of engine processes that compute prompts and hand their KV blocks over.", 0
    )
    decode: int = option(
        "With --prefill: number of engine processes that draw the answers, instead of --replicas.", 0
    )
    role: str = option(
        "Role of the engine among servers of several hosts: prefill or decode. Default: both.", "both"
    )
    transfer_address: str = option(
        "With --role prefill: where decode engines reach it, unix:PATH or tcp:HOST:PORT.",
        "",
        metavar="ADDRESS",
    )
    prefill_engine: list[str] | None = option(
        "With --role decode: address of a prefill engine. Can be given more than once.",
        None,
        metavar="ADDRESS",
    )
    remote_ranks: int = option("Number of ranks of --tp, --pp, --dp and --ep that join from other hosts.", 0)
    rank_address: str = option(
        "With --remote-ranks: HOST:PORT of this host at which they join.", "", metavar="HOST:PORT"
    )
    rank_of: str = option(
        "Be a rank of the engine that waits at this --rank-address, instead of a server.",
        "",
        metavar="HOST:PORT",
    )
    transfer_stall_s: float = option(
        "Seconds after which a KV transfer, or a prefill engine, that stands still is given up.",
        10.0,
        "--transfer-stall",
    )
    max_queue: int = option("Maximum number of queued requests; more are refused with 429.", 1024)
    max_running: int | None = option("Maximum number of running sequences.", None)
    max_tokens_per_step: int | None = option(
        "Maximum number of tokens in a step, of prompts and answers together.", None
    )
    shared_step_ms: float | None = option(
        "Time of a step while several keys have requests, in ms; twice as long while one has. Default: 40.",
        None,
    )
    max_body_mib: float = option(
        "Maximum size of a request body, in MiB; larger ones are refused with 413.", 4.0
    )
    files: Path | None = option(
        "Keep uploaded files and batches in this folder, and resume batches after a restart. Default: a "
        "temporary folder, deleted when the server stops.",
        None,
        metavar="DIR",
    )
    max_file_mib: float = option(
        "Maximum size of a file in /v1/files, in MiB; larger ones are refused with 413.", 100.0
    )
    max_files_mib: float = option("Maximum size of all files of one key, in MiB.", 2048.0)
    lenient: bool = option(
        "Ignore unknown fields of requests and warn in a header, instead of answering 400.",
        False,
        "--lenient",
    )
    stall_timeout_s: float = option(
        "Restart the engine after this many seconds without a finished step.", 60.0, "--stall-timeout"
    )
    drain_timeout_s: float = option(
        "Seconds that running requests have to finish after SIGTERM or Ctrl-C.", 30.0, "--drain-timeout"
    )
    max_connections: int = option(
        "Maximum number of open connections; beyond it, idle ones are closed, then new ones get 503.", 4096
    )
    max_connections_per_address: int | None = option(
        "Maximum number of open connections per client address. Default: half of all.", None
    )
    header_timeout_s: float = option(
        "Seconds that a client has to send the header of a request.", 10.0, "--header-timeout"
    )
    body_timeout_s: float = option(
        "Seconds that a client can pause while it sends a body.", 20.0, "--body-timeout"
    )
    keep_alive_timeout_s: float = option(
        "Seconds that a connection can be idle between two requests.", 75.0, "--keep-alive-timeout"
    )
    write_timeout_s: float = option(
        "Abort an answer after this many seconds in which the client reads none of it.",
        60.0,
        "--write-timeout",
    )
    allow_host: list[str] | None = option(
        "Host name that clients can use for this server, such as a reverse proxy's. Can be given more than "
        "once; '*': any name.",
        None,
        metavar="NAME",
    )
    cors_origin: list[str] | None = option(
        "Web origin that can call the server (CORS). Can be given more than once. Default: none.", None
    )
    chat_template: Path | None = option(
        "Jinja2 chat template to use instead of the model's own.", None, metavar="FILE"
    )
    parse_special_tokens: bool = option(
        "Parse special tokens in requests, such as <|im_end|>. Unsafe for text you do not trust.",
        False,
        "--parse-special-tokens",
    )
    open_browser: bool = option("Open the console in a browser, if there is a screen.", False, "--open")
    stories: int = option("Number of requests kept for `cumulo explain`.", 1000)
    stored_responses: int = option("Number of responses of /v1/responses kept in memory; 0: none.", 1000)
    log_prompts: bool = option("Write prompts and answers to the log.", False, "--log-prompts")
    log_level: str = option("Log level: debug, info, warning or error.", "info")
    otlp_endpoint: str | None = option(
        "Send traces to this OpenTelemetry collector (OTLP/HTTP). Default: $OTEL_EXPORTER_OTLP_ENDPOINT, or "
        "none.",
        None,
        metavar="URL",
    )
    console: bool = option("Serve the web console at /.", True, "--console/--no-console")
    promise: PromiseOptions = PromiseOptions()
    tiers: TierOptions = TierOptions()
    engine: options.EngineOptions = options.EngineOptions()


@takes_options
def serve(chosen: ServeCommandOptions) -> None:
    """Serve a model with an OpenAI-compatible API. /docs lists all endpoints."""
    from cumulo.errors import CumuloError

    if chosen.new_api_key is not None:
        _make_key(chosen.new_api_key, chosen)
        return
    if chosen.cache_group is not None:
        raise CumuloError("--cache-group applies to a new key: add --new-api-key NAME")
    if chosen.operator:
        raise CumuloError("--operator applies to a new key: add --new-api-key NAME")
    if chosen.log_level not in ("debug", "info", "warning", "error"):
        raise CumuloError(f"--log-level must be debug, info, warning or error, got {chosen.log_level!r}")
    if chosen.max_running is not None and chosen.max_running < 1:
        raise CumuloError(f"--max-running must be 1 or more, got {chosen.max_running}")
    if chosen.max_tokens_per_step is not None and chosen.max_tokens_per_step < 1:
        raise CumuloError(f"--max-tokens-per-step must be 1 or more, got {chosen.max_tokens_per_step}")
    if chosen.plan is not None:
        from cumulo.cli.shared.plan_start import with_plan

        chosen = with_plan(chosen, chosen.plan)
    if chosen.rank_of:
        _be_rank(chosen)
        return
    if (
        chosen.replicas == 1
        and not chosen.prefill
        and not chosen.autoscale
        and "cumulo.serve.server" not in sys.modules
    ):
        from cumulo.serve.engine_link import early_start

        early_start.begin()  # its imports take as long as this process's
    try:
        from cumulo.serve.options import ServeOptions
        from cumulo.serve.server import run
    except ImportError as error:
        raise CumuloError(
            f"the server needs packages that are not installed ({error.name}): "
            "pip install -e '.[serve]' in Cumulo's folder"
        ) from error
    from cumulo.cli.shared.terminal import note
    from cumulo.serve.fleet.key import fleet_key
    from cumulo.serve.observe import steady_stderr

    steady_stderr.install()  # before the first note: one that cannot be written must not end the server
    shared_step_s = None if chosen.shared_step_ms is None else chosen.shared_step_ms / 1e3
    key = fleet_key(chosen.fleet_key_file)
    told = vars(chosen) | {
        "engine": chosen.engine.config(
            max_running=chosen.max_running,
            max_loras=chosen.max_loras,
            max_lora_rank=chosen.max_lora_rank,
            max_tokens_per_step=chosen.max_tokens_per_step,
            shared_step_s=shared_step_s,
            **chosen.promise.config(),
            **chosen.tiers.config(),
            **_role(chosen, key),
        ),
        "lora": tuple(chosen.lora or ()),
        "replicas": chosen.decode or chosen.replicas,
        "max_body_bytes": int(chosen.max_body_mib * (1 << 20)),
        "max_file_bytes": int(chosen.max_file_mib * (1 << 20)),
        "files_per_key_bytes": int(chosen.max_files_mib * (1 << 20)),
        "allow_hosts": tuple(chosen.allow_host or ()),
        "cors_origins": tuple(chosen.cors_origin or ()),
        "fleet_key": key,
        "otlp_endpoint": chosen.otlp_endpoint or _standard_otlp_endpoint(),
    }
    served = ServeOptions(**{one.name: told[one.name] for one in fields(ServeOptions) if one.name in told})
    address = ""

    def on_listening(url: str) -> None:
        nonlocal address
        address = url
        note(f"listening on {url}; loading the model")

    extend = _console() if chosen.console else None

    def on_ready(info: "Ready") -> None:
        note(f"{info.model_name} is ready at {address}/v1 (context {info.max_context:,}; {info.runs_on})")
        if served.lora:
            note(f"adapters: {', '.join(one.partition('=')[0] for one in served.lora)}")
        if extend is not None:
            note(f"the console is at {address}/")
            if chosen.open_browser:
                _open(address)
        elif chosen.console:
            note(
                "the console is not installed; to install it: pip install -e '.[console]' in Cumulo's folder"
            )

    run(served, on_listening=on_listening, on_ready=on_ready, extend=extend)


def _be_rank(chosen: ServeCommandOptions) -> None:
    """This process is a rank of an engine on another host, until it is interrupted."""
    from cumulo.cli.shared.terminal import note
    from cumulo.engine.play.rank_join import serve_rank
    from cumulo.errors import CumuloError
    from cumulo.serve.fleet.key import fleet_key

    key = fleet_key(chosen.fleet_key_file)
    if key is None:
        raise CumuloError("--rank-of needs the engine's key: add --fleet-key-file FILE")
    note(f"joining the engine at {chosen.rank_of}")
    serve_rank(chosen.rank_of, key, chosen.model, chosen.engine.threads)


def _role(chosen: ServeCommandOptions, key: str | None) -> dict[str, Any]:
    """The engine's options that say which part of a split deployment it is."""
    from cumulo.errors import CumuloError

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
    import os

    from cumulo.cli.shared.terminal import note

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
    import os
    import sys
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
    from cumulo.errors import CumuloError
    from cumulo.serve.access.keys import new_key

    if chosen.api_keys is None:
        raise CumuloError("--new-api-key needs --api-keys FILE, the file that stores the hash of the key")
    print(
        new_key(
            chosen.api_keys,
            name,
            chosen.requests_per_minute,
            chosen.tokens_per_minute,
            chosen.cache_group,
            chosen.operator,
        )
    )
