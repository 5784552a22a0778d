"""`cumulo serve`: an OpenAI-compatible server for one model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cumulo.cli.shared import options

if TYPE_CHECKING:
    from fastapi import FastAPI

    from cumulo.serve.engine_link.messages import Ready

EXAMPLE = (
    "Example: [bold]cumulo serve --port 8000[/bold], then point any OpenAI client at http://127.0.0.1:8000/v1"
)


def serve(
    model: options.ModelArgument = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all network interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API. Default: the model's own name.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Require one of the API keys in this file.")
    ] = None,
    new_api_key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Create a key, add its hash to --api-keys FILE, print the key and exit."
        ),
    ] = None,
    cache_group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --new-api-key: keys of the same group share the prefix cache."
        ),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Request limit per key; with --new-api-key: limit of the new key.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Token limit per key, for prompts and answers together.")
    ] = None,
    default_max_tokens: Annotated[
        int,
        typer.Option(
            help="Max tokens of a chat answer if the request does not set max_tokens; 0: the rest of the context."
        ),
    ] = 4096,
    max_queue: Annotated[
        int, typer.Option(help="Maximum number of queued requests; more are refused with 429.")
    ] = 1024,
    max_running: Annotated[int | None, typer.Option(help="Maximum number of running sequences.")] = None,
    shared_step_ms: Annotated[
        float | None,
        typer.Option(help="Prefill time per step while several keys have requests, in ms. Default: 40."),
    ] = None,
    max_body_mib: Annotated[
        float, typer.Option(help="Maximum size of a request body, in MiB; larger ones are refused with 413.")
    ] = 4.0,
    files: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep uploaded files and batches in this folder, and resume batches after a restart. Default: a "
            "temporary folder, deleted when the server stops.",
        ),
    ] = None,
    max_file_mib: Annotated[
        float,
        typer.Option(help="Maximum size of a file in /v1/files, in MiB; larger ones are refused with 413."),
    ] = 100.0,
    max_files_mib: Annotated[
        float, typer.Option(help="Maximum size of all files of one key, in MiB.")
    ] = 2048.0,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient",
            help="Ignore unknown fields of requests and warn in a header, instead of answering 400.",
        ),
    ] = False,
    stall_timeout: Annotated[
        float, typer.Option(help="Restart the engine after this many seconds without a finished step.")
    ] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to finish after SIGTERM or Ctrl-C.")
    ] = 30.0,
    max_connections: Annotated[
        int,
        typer.Option(
            help="Maximum number of open connections; beyond it, idle ones are closed, then new ones get 503."
        ),
    ] = 4096,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(help="Maximum number of open connections per client address. Default: half of all."),
    ] = None,
    header_timeout: Annotated[
        float, typer.Option(help="Seconds that a client has to send the header of a request.")
    ] = 10.0,
    body_timeout: Annotated[
        float, typer.Option(help="Seconds that a client can pause while it sends a body.")
    ] = 20.0,
    keep_alive_timeout: Annotated[
        float, typer.Option(help="Seconds that a connection can be idle between two requests.")
    ] = 75.0,
    write_timeout: Annotated[
        float,
        typer.Option(help="Abort an answer after this many seconds in which the client reads none of it."),
    ] = 60.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name that clients can use for this server, such as a reverse proxy's. Can be given more "
            "than once; '*': any name.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web origin that can call the server (CORS). Can be given more than once. Default: none."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja2 chat template to use instead of the model's own."),
    ] = None,
    parse_special_tokens: Annotated[
        bool,
        typer.Option(
            "--parse-special-tokens",
            help="Parse special tokens in requests, such as <|im_end|>. Unsafe for text you do not trust.",
        ),
    ] = False,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the console in a browser, if there is a screen.")
    ] = False,
    stories: Annotated[int, typer.Option(help="Number of requests kept for `cumulo explain`.")] = 1000,
    stored_responses: Annotated[
        int, typer.Option(help="Number of responses of /v1/responses kept in memory; 0: none.")
    ] = 1000,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and answers to the log.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")] = "info",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send traces to this OpenTelemetry collector (OTLP/HTTP). Default: "
            "$OTEL_EXPORTER_OTLP_ENDPOINT, or none.",
        ),
    ] = None,
    console: Annotated[
        bool, typer.Option("--console/--no-console", help="Serve the web console at /.")
    ] = True,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    kv_memory_gib: options.KvMemory = None,
    device: options.Device = None,
    weights: options.Weights = None,
    kv_dtype: options.KvDtype = None,
) -> None:
    """Serve a model with an OpenAI-compatible API. /docs lists all endpoints."""
    from cumulo.errors import CumuloError

    if new_api_key is not None:
        _make_key(api_keys, new_api_key, requests_per_minute, tokens_per_minute, cache_group)
        return
    if cache_group is not None:
        raise CumuloError("--cache-group applies to a new key: add --new-api-key NAME")
    if log_level not in ("debug", "info", "warning", "error"):
        raise CumuloError(f"--log-level must be debug, info, warning or error, got {log_level!r}")
    if max_running is not None and max_running < 1:
        raise CumuloError(f"--max-running must be 1 or more, got {max_running}")
    try:
        from cumulo.serve.options import ServeOptions
        from cumulo.serve.server import run
    except ImportError as error:
        raise CumuloError(
            f"the server needs packages that are not installed ({error.name}): "
            "pip install -e '.[serve]' in Cumulo's folder"
        ) from error
    from cumulo.cli.shared.terminal import note
    from cumulo.serve.observe import steady_stderr

    steady_stderr.install()  # before the first note: one that cannot be written must not end the server
    chosen = ServeOptions(
        model=model,
        name=name,
        chat_template=chat_template,
        parse_special_tokens=parse_special_tokens,
        engine=options.engine_config(
            threads=threads,
            max_context=max_context,
            kv_memory_gib=kv_memory_gib,
            device=device,
            weights=weights,
            kv_dtype=kv_dtype,
            max_running=max_running,
            shared_step_s=None if shared_step_ms is None else shared_step_ms / 1e3,
        ),
        host=host,
        port=port,
        api_keys=api_keys,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        default_max_tokens=default_max_tokens,
        max_queue=max_queue,
        max_body_bytes=int(max_body_mib * (1 << 20)),
        files=files,
        max_file_bytes=int(max_file_mib * (1 << 20)),
        files_per_key_bytes=int(max_files_mib * (1 << 20)),
        lenient=lenient,
        stall_timeout_s=stall_timeout,
        drain_timeout_s=drain_timeout,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        keep_alive_timeout_s=keep_alive_timeout,
        write_timeout_s=write_timeout,
        allow_hosts=tuple(allow_host or ()),
        cors_origins=tuple(cors_origin or ()),
        stories=stories,
        stored_responses=stored_responses,
        log_prompts=log_prompts,
        log_level=log_level,
        otlp_endpoint=otlp_endpoint or _standard_otlp_endpoint(),
    )
    address = ""

    def on_bound(url: str) -> None:
        nonlocal address
        address = url
        note(f"listening on {url}; loading the model")

    extend = _console() if console else None

    def on_ready(info: "Ready") -> None:
        note(f"{info.model_name} is ready at {address}/v1 (context {info.max_context:,}; {info.runs_on})")
        if extend is not None:
            note(f"the console is at {address}/")
            if open_browser:
                _open(address)
        elif console:
            note(
                "the console is not installed; to install it: pip install -e '.[console]' in Cumulo's folder"
            )

    run(chosen, on_bound=on_bound, on_ready=on_ready, extend=extend)


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


def _make_key(
    path: Path | None, name: str, requests: int | None, tokens: int | None, cache_group: str | None
) -> None:
    from cumulo.errors import CumuloError
    from cumulo.serve.access.keys import new_key

    if path is None:
        raise CumuloError("--new-api-key needs --api-keys FILE, the file that stores the hash of the key")
    print(new_key(path, name, requests, tokens, cache_group))
