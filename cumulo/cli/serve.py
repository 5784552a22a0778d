"""`cumulo serve`: an OpenAI-compatible server for one model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cumulo.cli import options

if TYPE_CHECKING:
    from fastapi import FastAPI

    from cumulo.serve.messages import Ready

EXAMPLE = (
    "Example: [bold]cumulo serve --port 8000[/bold], then point any OpenAI client at http://127.0.0.1:8000/v1"
)


def serve(
    model: options.ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask for one of the keys in this file.")
    ] = None,
    new_api_key: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Make a key, add its hash to --api-keys FILE, print it and stop."),
    ] = None,
    cache_group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --new-api-key: keys of this group share cached prefixes."),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Limit per key (with --new-api-key: of the new one).")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Limit per key, prompt and answer tokens together.")
    ] = None,
    default_max_tokens: Annotated[
        int,
        typer.Option(
            help="Longest chat answer where a request has no max_tokens; 0: as many as fit the context."
        ),
    ] = 4096,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; beyond: 429.")] = 1024,
    max_running: Annotated[int | None, typer.Option(help="Sequences computed at the same time.")] = None,
    shared_step_ms: Annotated[
        float | None,
        typer.Option(help="While several keys ask, a step computes prompts for about this long; default 40."),
    ] = None,
    max_body_mib: Annotated[float, typer.Option(help="Largest request body; beyond: 413.")] = 4.0,
    files: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep uploaded files and batches here and resume batches; left out: until the server ends.",
        ),
    ] = None,
    max_file_mib: Annotated[float, typer.Option(help="Largest file of /v1/files; beyond: 413.")] = 100.0,
    max_files_mib: Annotated[float, typer.Option(help="All files of one key together.")] = 2048.0,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient", help="Ignore unknown fields of requests, with a warning header, instead of 400."
        ),
    ] = False,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds without a finished step after which the engine is restarted.")
    ] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds running requests may take to finish after SIGTERM or Ctrl-C.")
    ] = 30.0,
    max_connections: Annotated[
        int, typer.Option(help="Open connections; beyond: the longest idle are closed, then 503.")
    ] = 4096,
    max_connections_per_address: Annotated[
        int | None, typer.Option(help="Open connections of one client address; left out: half of all.")
    ] = None,
    header_timeout: Annotated[
        float, typer.Option(help="Seconds a client may take to send a request's header.")
    ] = 10.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds a client may pause while it sends a body.")] = 20.0,
    keep_alive_timeout: Annotated[
        float, typer.Option(help="Seconds a connection may be idle between two requests.")
    ] = 75.0,
    write_timeout: Annotated[
        float, typer.Option(help="Seconds in which a client reads nothing of its answer; then it is aborted.")
    ] = 60.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name clients may use for this server, such as a reverse proxy's; may be repeated; '*': any.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web origin that may call; may be repeated. None by default.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A jinja2 template instead of the model's own.")
    ] = None,
    parse_special_tokens: Annotated[
        bool,
        typer.Option(
            "--parse-special-tokens",
            help="Recognise special tokens that callers write, such as <|im_end|>. Unsafe with texts you do not trust.",
        ),
    ] = False,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the console in a browser, where there is a screen.")
    ] = False,
    stories: Annotated[int, typer.Option(help="Requests kept for `cumulo explain`.")] = 1000,
    stored_responses: Annotated[
        int, typer.Option(help="Responses of /v1/responses kept in memory to be continued; 0: none.")
    ] = 1000,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and answers to the log.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send traces to this OpenTelemetry collector (OTLP/HTTP); left out: "
            "$OTEL_EXPORTER_OTLP_ENDPOINT, or none.",
        ),
    ] = None,
    console: Annotated[
        bool, typer.Option("--console/--no-console", help="Web pages at / to chat and to watch the engine.")
    ] = True,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    kv_memory_gib: options.KvMemory = None,
    device: options.Device = None,
    weights: options.Weights = None,
    kv_dtype: options.KvDtype = None,
) -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/completions and more; /docs lists all."""
    from cumulo.errors import CumuloError

    if new_api_key is not None:
        _make_key(api_keys, new_api_key, requests_per_minute, tokens_per_minute, cache_group)
        return
    if cache_group is not None:
        raise CumuloError("--cache-group belongs to a new key: give --new-api-key NAME too")
    if log_level not in ("debug", "info", "warning", "error"):
        raise CumuloError(f"--log-level is debug, info, warning or error, not {log_level!r}")
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
    from cumulo.cli.terminal import note
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
            note("there is no console: pip install -e '.[console]' in Cumulo's folder for one")

    run(chosen, on_bound=on_bound, on_ready=on_ready, extend=extend)


def _standard_otlp_endpoint() -> str | None:
    """OpenTelemetry's own variable. It may be meant for other programs, so what we cannot use is passed over."""
    import os

    from cumulo.cli.terminal import note

    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        note(f"OTEL_EXPORTER_OTLP_ENDPOINT is {endpoint!r}, not an http(s) URL: there are no traces")
        return None
    try:
        import cumulo.serve.otel  # noqa: F401
    except ImportError:
        note(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but there are no traces: pip install -e '.[otel]' in Cumulo's "
            "folder for them"
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
    from cumulo.serve.keys import new_key

    if path is None:
        raise CumuloError("--new-api-key needs --api-keys FILE: where the key's hash is kept")
    print(new_key(path, name, requests, tokens, cache_group))
