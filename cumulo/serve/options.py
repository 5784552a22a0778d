"""ServeOptions: every option of the server, documented where it is defined. Made by `cumulo serve`."""

from dataclasses import dataclass, field
from pathlib import Path

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide import routing
from cumulo.errors import CumuloError, require_least
from cumulo.fleet.decide.autoscale_settings import parse_autoscale
from cumulo.models.files.hub import BUILT_IN_NAME, BUILT_IN_TITLE
from cumulo.models.files.pull import DEFAULT_HUB

ALL_PULLED = "pulled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    model: str | None = None  # None: the built-in one
    name: str | None = None  # what clients call the model; None: its own name
    # Further models, loaded on request, each as MODEL or NAME=MODEL; "pulled": all that were pulled
    models: tuple[str, ...] = ()
    models_memory_gib: float | None = None  # of loaded models together; None: what is free at the start
    models_idle_s: float = 300.0  # without a request, until one is unloaded; 0: until others need its memory
    hub: str = DEFAULT_HUB  # that models are pulled from
    lora: tuple[str, ...] = ()  # adapters, each as NAME=FOLDER; room for them is in `engine`
    chat_template: Path | None = None  # a jinja2 file instead of the model's own
    parse_special_tokens: bool = False  # recognise special tokens in what callers write, too
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1  # engine processes; more than one: each request goes to the one that `router` chooses
    autoscale: str = (
        ""  # fewest..most replicas, and how eagerly: "0..3,idle=60s"; empty: `replicas` stay as they are
    )
    router: str = "prefix-aware"  # or "least-loaded", "round-robin"
    prefill: int = 0  # further engine processes, which compute the prompts of the replicas
    host: str = "127.0.0.1"  # only this machine; 0.0.0.0 for every network it is in
    port: int = 8000  # 0: any free one
    api_keys: Path | None = None  # None: no key is asked for
    fleet_key: str | None = None  # what a gateway shows; None: no gateway may ask for more than clients may
    # Per key without a limit of its own; without keys, for all together.
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output tokens, counted likewise
    # Of chat answers whose request has no limit; 0: as many as fit the context; None: see `chat_limit`.
    default_max_tokens: int | None = None
    max_queue: int = 1024  # sequences that may wait for a place; beyond, 429
    max_body_bytes: int = 4 << 20  # beyond, 413
    files: Path | None = None  # folder of /v1/files and /v1/batches; None: a temporary one, gone at the end
    max_file_bytes: int = 100 << 20  # of one uploaded file; beyond, 413
    files_per_key_bytes: int = 2 << 30  # of all files of one key, results of batches included
    files_bytes: int = 20 << 30  # of all files
    lenient: bool = False  # fields of requests that are not known are ignored with a warning, not refused
    stall_timeout_s: float = 60.0  # an engine that has work and finishes no step for this long is restarted
    start_timeout_s: float = 900.0  # to load the model
    drain_timeout_s: float = 30.0  # after SIGTERM: how long running requests may take to finish
    max_connections: int = 4096  # open at the same time; beyond, the longest idle are closed, then 503
    max_connections_per_address: int | None = None  # of one client address; None: half of max_connections
    # For a new connection's first byte, and from there to the end of the header.
    header_timeout_s: float = 10.0
    body_timeout_s: float = 20.0  # longest pause in a body; after it, 4,096 bytes a second on average
    keep_alive_timeout_s: float = 75.0  # between two requests on a connection
    write_timeout_s: float = 60.0  # longest time in which a client reads nothing of its answer
    allow_hosts: tuple[str, ...] = ()  # names in `Host` beyond this machine's own; "*": any
    cors_origins: tuple[str, ...] = ()  # web pages that may call; none by default
    stories: int = 1000  # requests whose story is kept for /v1/requests/{id}/explain
    stored_responses: int = 1000  # of /v1/responses, in memory and at most 64 MiB; 0: none is kept
    log_prompts: bool = False  # prompts and answers in the log: off unless asked for
    log_level: str = "info"
    # Base URL of an OpenTelemetry collector (OTLP over HTTP); None: no traces.
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        routing.router(self.router)  # refuses one that does not exist
        require_least(
            self, 1, "replicas", "max_body_bytes", "max_file_bytes", "files_per_key_bytes", "files_bytes",
            "stories", "requests_per_minute", "tokens_per_minute", "max_connections", "max_connections_per_address",
        )  # fmt: skip
        require_least(self, 0, "prefill", "max_queue", "stored_responses", "default_max_tokens")
        require_least(self, 0, "drain_timeout_s", "models_idle_s", unit=" seconds")
        require_least(self, 0, "models_memory_gib", above=True)
        require_least(
            self, 0, "stall_timeout_s", "start_timeout_s", "header_timeout_s", "body_timeout_s",
            "keep_alive_timeout_s", "write_timeout_s", above=True, unit=" seconds",
        )  # fmt: skip
        if self.engine.remote_ranks and (self.replicas > 1 or self.prefill):
            raise CumuloError(
                "remote_ranks works with one engine: start a server for each engine, and `cumulo gateway` in front"
            )
        if self.autoscale:
            scaled = parse_autoscale(self.autoscale)
            limits, prefill = scaled.limits, scaled.prefill
            if not limits.fewest <= self.replicas <= limits.most:
                raise CumuloError(
                    f"replicas={self.replicas} must be within autoscale {limits.fewest}..{limits.most}"
                )
            if self.engine.remote_ranks:
                raise CumuloError("autoscale starts engines on this machine: omit remote_ranks")
            if prefill is not None and not max(1, prefill.fewest) <= self.prefill <= prefill.most:
                raise CumuloError(
                    f"prefill={self.prefill} must be 1 or more, and within autoscale's "
                    f"prefill={prefill.fewest}..{prefill.most}"
                )
        if self.prefill and self.engine.role != "both":
            raise CumuloError(
                f"prefill={self.prefill} gives every engine its role: omit role={self.engine.role}, or omit prefill"
            )
        if self.models and (problem := self._why_one_model()):
            raise CumuloError(f"models are loaded on request by one engine process each: {problem}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise CumuloError(
                f"otlp_endpoint must be the URL of a collector that speaks OTLP over HTTP, for instance "
                f"http://127.0.0.1:4318, got {self.otlp_endpoint!r}"
            )
        if not 0 <= self.port <= 65535:
            raise CumuloError(f"port must be 0 to 65535, got {self.port}")

    def _why_one_model(self) -> str:
        engine = self.engine
        if self.replicas > 1 or self.prefill or self.autoscale or engine.role != "both":
            return "omit replicas, autoscale, prefill and role, or omit models"
        if engine.layout.world > 1:
            return "omit tp, pp, dp and ep, or omit models"
        return "speculate with ngram, or omit models" if engine.speculate not in ("", "ngram") else ""

    @property
    def chat_limit(self) -> int:
        """Max tokens of a chat answer whose request has no limit. So small a model as the built-in one may repeat
        itself without an end, so its answers are cut sooner."""
        if self.default_max_tokens is not None:
            return self.default_max_tokens
        return 512 if self.model in (None, BUILT_IN_NAME, BUILT_IN_TITLE) else 4096
