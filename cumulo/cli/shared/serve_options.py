"""Options of `cumulo serve`, in the panels of its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cumulo.cli.shared import options
from cumulo.cli.shared.declare import Panel, option
from cumulo.cli.shared.options import TierOptions
from cumulo.errors import CumuloError
from cumulo.models.files.pull import DEFAULT_HUB


@dataclass(frozen=True, kw_only=True)
class PromiseOptions:
    PANEL: ClassVar[str] = "Latency"

    slo: str = option(
        "Latency to promise, for example ttft=500ms,itl=40ms: prompts are computed in pieces that keep the ITL, in "
        "order of deadline, and a request whose promise cannot be kept is refused with 429. Keys and requests can "
        "have their own; with --new-api-key: the new key's.",
        "",
    )
    slo_late: str = option(
        "With --slo: refuse, or queue (without a promise), a request whose promise cannot be kept.", "refuse"
    )

    def config(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        from cumulo.load.slo import parse_promise

        if self.slo_late not in ("refuse", "queue"):
            raise CumuloError(f"--slo-late must be refuse or queue, got {self.slo_late!r}")
        return {"slo": parse_promise(self.slo) if self.slo else None, "slo_late": self.slo_late}


MODEL = Panel("Model and adapters")
KEYS = Panel("API keys")
REPLICAS = Panel("Replicas and other hosts")
LIMITS = Panel("Limits of the server")
OBSERVE = Panel("Log, stories and traces")


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """What `cumulo serve` and `cumulo gateway` have in common."""

    host: str = option("Address to listen on; 0.0.0.0: all network interfaces.", "127.0.0.1")
    port: int = option("Port to listen on; 0: any free port.", 8000)
    requests_per_minute: int | None = KEYS(
        "Request limit per key; with --new-api-key: limit of the new key.", None
    )
    tokens_per_minute: int | None = KEYS("Token limit per key, for prompts and answers together.", None)
    max_body_mib: float = LIMITS(
        "Maximum size of a request body, in MiB; larger ones are refused with 413.", 4.0
    )
    drain_timeout_s: float = LIMITS(
        "Seconds that running requests have to finish after SIGTERM or Ctrl-C.", 30.0
    )
    max_connections: int = LIMITS(
        "Maximum number of open connections; beyond it, idle ones are closed, then new ones get 503.", 4096
    )
    allow_host: list[str] | None = LIMITS(
        "Host name that clients can use for this server, such as a reverse proxy's. Can be given more than "
        "once; '*': any name.",
        None,
        metavar="NAME",
    )
    cors_origin: list[str] | None = LIMITS(
        "Web origin that can call the server (CORS). Can be given more than once. Default: none.", None
    )
    stories: int = OBSERVE("Number of requests kept for `cumulo explain`.", 1000)
    log_level: str = OBSERVE("Log level: debug, info, warning or error.", "info")

    def fields(self) -> dict[str, Any]:
        """Fields of ServeOptions and of GatewayOptions."""
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise CumuloError(f"--log-level must be debug, info, warning or error, got {self.log_level!r}")
        return vars(self) | {
            "max_body_bytes": int(self.max_body_mib * (1 << 20)),
            "allow_hosts": tuple(self.allow_host or ()),
            "cors_origins": tuple(self.cors_origin or ()),
        }


@dataclass(frozen=True, kw_only=True)
class ServeCommandOptions:
    model: options.ModelArgument = None
    plan: Path | None = option(
        "Start the deployment of this file, made by `cumulo plan serve --out FILE`. Options that are typed come "
        "before those of the file.",
        None,
    )
    web: WebOptions = WebOptions()
    name: str | None = MODEL("Name of the model in the API. Default: the model's own name.", None)
    models: list[str] | None = MODEL(
        "Also serve this model, loaded when a request names it: a folder, a GGUF file or a name; 'pulled': all "
        "models of cumulo pull; 'none': no further model. Can be given more than once. Default: pulled, unless "
        "MODEL is given.",
        None,
        metavar="[NAME=]MODEL",
    )
    models_memory_gib: float | None = MODEL(
        "With several models: memory for those that are loaded, in GiB; the least recently used ones make way. "
        "Default: what is free at the start.",
        None,
    )
    models_idle_s: float = MODEL(
        "With several models: seconds without a request after which one is unloaded; 0: when others need its "
        "memory.",
        300.0,
    )
    hub: options.HubOption = DEFAULT_HUB
    lora: list[str] | None = MODEL(
        "Serve a low-rank adapter: requests name it as their model. Can be given more than once.",
        None,
        metavar="NAME=DIR",
    )
    max_loras: int | None = MODEL(
        "Maximum number of adapters loaded at the same time, with --lora or POST /v1/load_lora_adapter. Default: 8 "
        "with --lora, otherwise none.",
        None,
    )
    max_lora_rank: int | None = MODEL(
        "Maximum rank of an adapter. Default: 16, or the highest rank among those of --lora.", None
    )
    api_keys: Path | None = KEYS("Require one of the API keys in this file.", None)
    fleet_key_file: Path | None = REPLICAS(
        "File with the key that a gateway shows (cumulo gateway). Default: $CUMULO_FLEET_KEY, or none.", None
    )
    new_api_key: str | None = KEYS(
        "Create a key, add its hash to --api-keys FILE, print the key and exit.", None, metavar="NAME"
    )
    cache_group: str | None = KEYS(
        "With --new-api-key: keys of the same group share the prefix cache.", None, metavar="NAME"
    )
    operator: bool = KEYS.flag(
        "With --new-api-key: the key can operate replicas, and sees the requests of all keys in the console."
    )
    default_max_tokens: int | None = MODEL(
        "Max tokens of a chat answer if the request does not set max_tokens; 0: the rest of the context. "
        "Default: 4096, and 512 for the built-in model.",
        None,
    )
    replicas: int = REPLICAS(
        "Number of engine processes, each with its own copy of the model. The streams of one that fails are "
        "continued by another.",
        1,
    )
    autoscale: str = REPLICAS(
        "Fewest and most replicas between which the load decides, as in 1..4; 0..4 scales to zero. Further "
        "settings follow: 0..4,idle=60s,interval=5s,ttft=1s; with --prefill also prefill=1..2, and devices=5 for "
        "all engines together.",
        "",
        metavar="MIN..MAX",
    )
    router: str = REPLICAS(
        "With --replicas: which of them gets a request: prefix-aware, least-loaded or round-robin.",
        "prefix-aware",
    )
    prefill: int = REPLICAS(
        "With --decode: number of engine processes that compute prompts and hand their KV blocks over.", 0
    )
    decode: int = REPLICAS(
        "With --prefill: number of engine processes that draw the answers, instead of --replicas.", 0
    )
    role: str = REPLICAS(
        "Role of the engine among servers of several hosts: prefill, decode or both.", "both"
    )
    transfer_address: str = REPLICAS(
        "With --role prefill: where decode engines reach it, unix:PATH or tcp:HOST:PORT.",
        "",
        metavar="ADDRESS",
    )
    prefill_engine: list[str] | None = REPLICAS(
        "With --role decode: address of a prefill engine. Can be given more than once.",
        None,
        metavar="ADDRESS",
    )
    remote_ranks: int = REPLICAS(
        "Number of ranks of --tp, --pp, --dp and --ep that join from other hosts.", 0
    )
    rank_address: str = REPLICAS(
        "With --remote-ranks: HOST:PORT of this host at which they join.", "", metavar="HOST:PORT"
    )
    rank_of: str = REPLICAS(
        "Be a rank of the engine that waits at this --rank-address, instead of a server.",
        "",
        metavar="HOST:PORT",
    )
    rank_count: int = REPLICAS("With --rank-of: number of ranks on this host, one process each.", 1, min=1)
    transfer_stall_s: float = REPLICAS(
        "Seconds after which a KV transfer, or a prefill engine, that stands still is given up.", 10.0
    )
    max_queue: int = LIMITS("Maximum number of queued requests; more are refused with 429.", 1024)
    shared_step_ms: float | None = LIMITS(
        "Time of a step while several keys have requests, in ms; twice as long while one has. Default: 40.",
        None,
    )
    files: Path | None = LIMITS(
        "Keep uploaded files and batches in this folder, and resume batches after a restart. Default: a "
        "temporary folder, deleted when the server stops.",
        None,
        metavar="DIR",
    )
    max_file_mib: float = LIMITS(
        "Maximum size of a file in /v1/files, in MiB; larger ones are refused with 413.", 100.0
    )
    max_files_mib: float = LIMITS(
        "Maximum size of all files of one key, in MiB, including the results of batches.", 2048.0
    )
    max_all_files_mib: float = LIMITS("Maximum size of all files of all keys, in MiB.", 20480.0)
    lenient: bool = LIMITS.flag(
        "Ignore unknown fields of requests and warn in a header, instead of answering 400."
    )
    stall_timeout_s: float = LIMITS(
        "Restart the engine after this many seconds without a finished step.", 60.0
    )
    max_connections_per_address: int | None = LIMITS(
        "Maximum number of open connections per client address. Default: half of all.", None
    )
    header_timeout_s: float = LIMITS("Seconds that a client has to send the header of a request.", 10.0)
    body_timeout_s: float = LIMITS("Seconds that a client can pause while it sends a body.", 20.0)
    keep_alive_timeout_s: float = LIMITS("Seconds that a connection can be idle between two requests.", 75.0)
    write_timeout_s: float = LIMITS(
        "Abort an answer after this many seconds in which the client reads none of it.", 60.0
    )
    chat_template: Path | None = MODEL("Jinja2 chat template to use instead of the model's own.", None)
    parse_special_tokens: bool = MODEL.flag(
        "Parse special tokens in requests, such as <|im_end|>. Unsafe for text you do not trust."
    )
    open_browser: bool = option("Open the console in a browser, if there is a screen.", False, "--open")
    stored_responses: int = OBSERVE("Number of responses of /v1/responses kept in memory; 0: none.", 1000)
    log_prompts: bool = OBSERVE.flag("Write prompts and answers to the log.")
    otlp_endpoint: str | None = OBSERVE(
        "Send traces to this OpenTelemetry collector (OTLP/HTTP). Default: $OTEL_EXPORTER_OTLP_ENDPOINT, or "
        "none.",
        None,
        metavar="URL",
    )
    console: bool = option("Serve the web console at /.", True, "--console/--no-console")
    steps: options.StepOptions = options.StepOptions()
    promise: PromiseOptions = PromiseOptions()
    tiers: TierOptions = TierOptions()
    engine: options.EngineOptions = options.EngineOptions()
