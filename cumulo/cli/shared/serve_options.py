"""Options of `cumulo serve`, in the panels of its help."""

from dataclasses import dataclass
from pathlib import Path

from cumulo.cli.shared import options
from cumulo.cli.shared.declare import option
from cumulo.cli.shared.promise_options import PromiseOptions
from cumulo.cli.shared.tier_options import TierOptions

MODEL = "Model and adapters"
KEYS = "API keys"
REPLICAS = "Replicas and other hosts"
LIMITS = "Limits of the server"
OBSERVE = "Log, stories and traces"


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
    name: str | None = option(
        "Name of the model in the API. Default: the model's own name.", None, panel=MODEL
    )
    lora: list[str] | None = option(
        "Serve a low-rank adapter: requests name it as their model. Can be given more than once.",
        None,
        metavar="NAME=DIR",
        panel=MODEL,
    )
    max_loras: int | None = option(
        "Maximum number of adapters loaded at the same time, with --lora or POST /v1/load_lora_adapter. Default: 8 "
        "with --lora, otherwise none.",
        None,
        panel=MODEL,
    )
    max_lora_rank: int | None = option(
        "Maximum rank of an adapter. Default: 16, or the highest rank among those of --lora.",
        None,
        panel=MODEL,
    )
    api_keys: Path | None = option(
        "Require one of the API keys in this file.", None, metavar="FILE", panel=KEYS
    )
    fleet_key_file: Path | None = option(
        "File with the key that a gateway shows (cumulo gateway). Default: $CUMULO_FLEET_KEY, or none.",
        None,
        metavar="FILE",
        panel=REPLICAS,
    )
    new_api_key: str | None = option(
        "Create a key, add its hash to --api-keys FILE, print the key and exit.",
        None,
        metavar="NAME",
        panel=KEYS,
    )
    cache_group: str | None = option(
        "With --new-api-key: keys of the same group share the prefix cache.", None, metavar="NAME", panel=KEYS
    )
    operator: bool = option(
        "With --new-api-key: the key can operate replicas, and sees the requests of all keys in the console.",
        False,
        "--operator",
        panel=KEYS,
    )
    requests_per_minute: int | None = option(
        "Request limit per key; with --new-api-key: limit of the new key.", None, panel=KEYS
    )
    tokens_per_minute: int | None = option(
        "Token limit per key, for prompts and answers together.", None, panel=KEYS
    )
    default_max_tokens: int | None = option(
        "Max tokens of a chat answer if the request does not set max_tokens; 0: the rest of the context. "
        "Default: 4096, and 512 for the built-in model.",
        None,
        panel=MODEL,
    )
    replicas: int = option(
        "Number of engine processes, each with its own copy of the model. The streams of one that fails are "
        "continued by another.",
        1,
        panel=REPLICAS,
    )
    autoscale: str = option(
        "Fewest and most replicas between which the load decides, as in 1..4; 0..4 scales to zero. Further "
        "settings follow: 0..4,idle=60s,interval=5s,ttft=1s; with --prefill also prefill=1..2, and devices=5 for "
        "all engines together.",
        "",
        metavar="MIN..MAX",
        panel=REPLICAS,
    )
    router: str = option(
        "With --replicas: which of them gets a request: prefix-aware, least-loaded or round-robin.",
        "prefix-aware",
        panel=REPLICAS,
    )
    prefill: int = option(
        "With --decode: number of engine processes that compute prompts and hand their KV blocks over.",
        0,
        panel=REPLICAS,
    )
    decode: int = option(
        "With --prefill: number of engine processes that draw the answers, instead of --replicas.",
        0,
        panel=REPLICAS,
    )
    role: str = option(
        "Role of the engine among servers of several hosts: prefill, decode or both.", "both", panel=REPLICAS
    )
    transfer_address: str = option(
        "With --role prefill: where decode engines reach it, unix:PATH or tcp:HOST:PORT.",
        "",
        metavar="ADDRESS",
        panel=REPLICAS,
    )
    prefill_engine: list[str] | None = option(
        "With --role decode: address of a prefill engine. Can be given more than once.",
        None,
        metavar="ADDRESS",
        panel=REPLICAS,
    )
    remote_ranks: int = option(
        "Number of ranks of --tp, --pp, --dp and --ep that join from other hosts.", 0, panel=REPLICAS
    )
    rank_address: str = option(
        "With --remote-ranks: HOST:PORT of this host at which they join.",
        "",
        metavar="HOST:PORT",
        panel=REPLICAS,
    )
    rank_of: str = option(
        "Be a rank of the engine that waits at this --rank-address, instead of a server.",
        "",
        metavar="HOST:PORT",
        panel=REPLICAS,
    )
    rank_count: int = option(
        "With --rank-of: number of ranks on this host, one process each.", 1, panel=REPLICAS, min=1
    )
    transfer_stall_s: float = option(
        "Seconds after which a KV transfer, or a prefill engine, that stands still is given up.",
        10.0,
        "--transfer-stall",
        panel=REPLICAS,
    )
    max_queue: int = option(
        "Maximum number of queued requests; more are refused with 429.", 1024, panel=LIMITS
    )
    max_running: int | None = option("Maximum number of running sequences.", None, panel=LIMITS)
    max_tokens_per_step: int | None = option(
        "Maximum number of tokens in a step, of prompts and answers together.", None, panel=LIMITS
    )
    shared_step_ms: float | None = option(
        "Time of a step while several keys have requests, in ms; twice as long while one has. Default: 40.",
        None,
        panel=LIMITS,
    )
    max_body_mib: float = option(
        "Maximum size of a request body, in MiB; larger ones are refused with 413.", 4.0, panel=LIMITS
    )
    files: Path | None = option(
        "Keep uploaded files and batches in this folder, and resume batches after a restart. Default: a "
        "temporary folder, deleted when the server stops.",
        None,
        metavar="DIR",
        panel=LIMITS,
    )
    max_file_mib: float = option(
        "Maximum size of a file in /v1/files, in MiB; larger ones are refused with 413.", 100.0, panel=LIMITS
    )
    max_files_mib: float = option("Maximum size of all files of one key, in MiB.", 2048.0, panel=LIMITS)
    lenient: bool = option(
        "Ignore unknown fields of requests and warn in a header, instead of answering 400.",
        False,
        "--lenient",
        panel=LIMITS,
    )
    stall_timeout_s: float = option(
        "Restart the engine after this many seconds without a finished step.",
        60.0,
        "--stall-timeout",
        panel=LIMITS,
    )
    drain_timeout_s: float = option(
        "Seconds that running requests have to finish after SIGTERM or Ctrl-C.",
        30.0,
        "--drain-timeout",
        panel=LIMITS,
    )
    max_connections: int = option(
        "Maximum number of open connections; beyond it, idle ones are closed, then new ones get 503.",
        4096,
        panel=LIMITS,
    )
    max_connections_per_address: int | None = option(
        "Maximum number of open connections per client address. Default: half of all.", None, panel=LIMITS
    )
    header_timeout_s: float = option(
        "Seconds that a client has to send the header of a request.", 10.0, "--header-timeout", panel=LIMITS
    )
    body_timeout_s: float = option(
        "Seconds that a client can pause while it sends a body.", 20.0, "--body-timeout", panel=LIMITS
    )
    keep_alive_timeout_s: float = option(
        "Seconds that a connection can be idle between two requests.",
        75.0,
        "--keep-alive-timeout",
        panel=LIMITS,
    )
    write_timeout_s: float = option(
        "Abort an answer after this many seconds in which the client reads none of it.",
        60.0,
        "--write-timeout",
        panel=LIMITS,
    )
    allow_host: list[str] | None = option(
        "Host name that clients can use for this server, such as a reverse proxy's. Can be given more than "
        "once; '*': any name.",
        None,
        metavar="NAME",
        panel=LIMITS,
    )
    cors_origin: list[str] | None = option(
        "Web origin that can call the server (CORS). Can be given more than once. Default: none.",
        None,
        panel=LIMITS,
    )
    chat_template: Path | None = option(
        "Jinja2 chat template to use instead of the model's own.", None, metavar="FILE", panel=MODEL
    )
    parse_special_tokens: bool = option(
        "Parse special tokens in requests, such as <|im_end|>. Unsafe for text you do not trust.",
        False,
        "--parse-special-tokens",
        panel=MODEL,
    )
    open_browser: bool = option("Open the console in a browser, if there is a screen.", False, "--open")
    stories: int = option("Number of requests kept for `cumulo explain`.", 1000, panel=OBSERVE)
    stored_responses: int = option(
        "Number of responses of /v1/responses kept in memory; 0: none.", 1000, panel=OBSERVE
    )
    log_prompts: bool = option("Write prompts and answers to the log.", False, "--log-prompts", panel=OBSERVE)
    log_level: str = option("Log level: debug, info, warning or error.", "info", panel=OBSERVE)
    otlp_endpoint: str | None = option(
        "Send traces to this OpenTelemetry collector (OTLP/HTTP). Default: $OTEL_EXPORTER_OTLP_ENDPOINT, or "
        "none.",
        None,
        metavar="URL",
        panel=OBSERVE,
    )
    console: bool = option("Serve the web console at /.", True, "--console/--no-console")
    promise: PromiseOptions = PromiseOptions()
    tiers: TierOptions = TierOptions()
    engine: options.EngineOptions = options.EngineOptions()
