"""Metrics: what /metrics shows, in Prometheus' format. Fed by Service with what passes through it.

Names and labels are vLLM's with `cumulo:` in place of `vllm:`, so that a dashboard ports by replacing a prefix;
after them comes what vLLM does not have: why requests wait, why they are preempted, what was recomputed, how
evenly tenants are served, and how far the memory plan's predictions were off.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from cumulo.serve.engine_link.messages import FairnessReport, Ready, Stats, TierStats
from cumulo.serve.observe.stories import Record
from cumulo.spec.slo import kept_itl_s

Kind = TypeVar("Kind", Counter, Gauge)
MOST_TENANTS = 100  # that have a series of their own
OTHER_TENANTS = "(others)"
_LABELS = ("model_name", "engine")
# Buckets, as vLLM has them.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_BETWEEN_TOKENS_S = (
    0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
_WHOLE_REQUEST_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, "0")
        gauge, counter, histogram, by_label = self._gauge, self._counter, self._histogram, self._by_label
        self._now: Stats | None = None  # what the engine said last; read when somebody asks
        self._of_now(
            "num_requests_running",
            "Number of sequences that the engine is computing.",
            lambda now: now.running,
        )
        self._of_now(
            "num_requests_waiting", "Number of sequences that wait to be admitted.", lambda now: now.waiting
        )
        self._of_now(
            "kv_cache_usage_perc", "Share of the KV blocks that are in use, from 0 to 1.",
            lambda now: now.blocks_used / now.blocks_total,
        )  # fmt: skip
        self.prefix_queries = counter(
            "prefix_cache_queries", "Number of prompt tokens that were looked up in the prefix cache."
        )
        self.prefix_hits = counter(
            "prefix_cache_hits", "Number of prompt tokens that were found in the prefix cache."
        )
        self.preempted = counter("num_preemptions", "Number of times a sequence was preempted.")
        self.prompt_tokens = counter("prompt_tokens", "Number of prompt tokens of requests that have ended.")
        self.generation_tokens = counter("generation_tokens", "Number of tokens that were generated.")
        self.iteration_tokens = histogram(
            "iteration_tokens_total", "Number of tokens that a step computes.", _TOKENS
        )
        self.ttft = histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", _FIRST_TOKEN_S
        )
        self.itl = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a streamed answer.", _BETWEEN_TOKENS_S
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a request.",
            _BETWEEN_TOKENS_S,
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "Time from a request's arrival to its end.", _WHOLE_REQUEST_S
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Time that a request waits to be admitted.", _WHOLE_REQUEST_S
        )
        self.inference = histogram(
            "request_inference_time_seconds", "Time from a request's admission to its end.", _WHOLE_REQUEST_S
        )
        self.kept_itl = histogram(
            "request_inter_token_latency_seconds",
            "Latency within which 99% of the streamed tokens of a request came after the one before.",
            _BETWEEN_TOKENS_S,
        )
        self.prefill = histogram(
            "request_prefill_time_seconds",
            "Time from a request's admission to its first token.",
            _WHOLE_REQUEST_S,
        )
        self.decode = histogram(
            "request_decode_time_seconds", "Time from a request's first token to its end.", _WHOLE_REQUEST_S
        )
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_output = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self.request_n = histogram(
            "request_params_n", "Number of answers that a request asks for.", (1, 2, 5, 10, 20)
        )
        self._success = by_label(
            Counter, "request_success", "Number of requests that have ended, by reason.", "finished_reason"
        )
        # -- what vLLM does not have
        self._preempted_by = by_label(
            Counter, "preemptions_by_reason", "Number of preemptions, by what needed the KV blocks.", "reason"
        )
        self.fairness = gauge(
            "fairness_index", "Jain's fairness index of the last minute's service to API keys; 1 is even."
        )
        self.fairness.set(1)
        self._tenant_tokens = Counter(
            "cumulo:tenant_tokens", "Number of prompt tokens computed and output tokens drawn, by API key.",
            (*_LABELS, "tenant", "kind"), registry=self.registry,
        )  # fmt: skip
        self._tenants: dict[str, str] = {}  # names with a series of their own: what others see instead
        self._ledger = Gauge(
            "cumulo:ledger_predicted_over_measured", "Planned memory over measured memory, by component.",
            (*_LABELS, "component"), registry=self.registry,
        )  # fmt: skip
        self._ledger_of: Ready | None = None
        self.promises = by_label(
            Counter,
            "slo_requests",
            "Number of requests with an SLO that was kept, missed or refused.",
            "outcome",
        )
        self.loras = gauge("lora_adapters", "Number of adapters that requests can name.")
        self.lora_requests = by_label(
            Counter,
            "lora_requests",
            "Number of calls that were answered with an adapter, by its name.",
            "adapter",
        )
        # Named as vLLM's.
        self.drafted = counter("spec_decode_num_draft_tokens", "Number of tokens drafted by speculation.")
        self.accepted = counter(
            "spec_decode_num_accepted_tokens", "Number of drafted tokens that were accepted."
        )
        self.drafted_tokens = self.accepted_tokens = 0  # the same, for the console
        self._tier_tokens = by_label(
            Counter, "kv_tier_hits", "Number of prompt tokens found in a KV tier beyond the device.", "tier"
        )
        self._tier_blocks = by_label(
            Gauge, "kv_tier_blocks", "Number of KV blocks that a tier holds.", "tier"
        )
        self._tier_moves = by_label(
            Counter, "kv_tier_moved_blocks", "Number of KV blocks moved between tiers, by direction.", "way"
        )
        self._tier_bytes = gauge("kv_disk_bytes", "Bytes of the files in the folder of --kv-disk.")
        self._tiers_told: dict[str, int] = {}
        self.recomputed = counter(
            "recomputed_tokens", "Number of tokens that were computed again after preemptions."
        )
        self._wait_by = by_label(
            Counter, "wait_seconds", "Seconds that requests waited, by what they waited for.", "reason"
        )
        self.batches = by_label(Gauge, "batches", "Number of batches, by status.", "status")
        self.batch_requests = by_label(
            Counter, "batch_requests", "Number of requests of batches that have ended, by outcome.", "outcome"
        )
        self._http = by_label(Counter, "http_responses", "Number of HTTP responses, by status.", "status")
        self._refused = by_label(
            Counter,
            "connections_refused",
            "Number of requests refused and connections closed, by reason.",
            "reason",
        )
        self.connections = gauge(
            "connections", "Number of open connections, WebSockets of the console included."
        )
        self.log_lines_lost = gauge("log_lines_lost", "Number of log lines that standard error did not take.")
        self._of_now(
            "prefix_cache_blocks", "Number of KV blocks in the prefix cache.", lambda now: now.blocks_cached
        )
        self.step = histogram(
            "step_duration_seconds", "Time that the runner takes for a step.", _BETWEEN_TOKENS_S
        )
        self.restarts = gauge("engine_restarts", "Number of times the engine process was replaced.")
        self.up = gauge("engine_up", "Whether the engine process is ready (1) or not (0).")

    # -- making them --------------------------------------------------------------------------------------
    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"cumulo:{name}", text, _LABELS, registry=self.registry).labels(*self._values)

    def _of_now(self, name: str, text: str, read: Callable[[Stats], float]) -> None:
        self._gauge(name, text).set_function(lambda: float(read(self._now)) if self._now is not None else 0.0)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"cumulo:{name}", text, _LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"cumulo:{name}", text, _LABELS, registry=self.registry, buckets=buckets)
        return metric.labels(*self._values)

    def _by_label(self, kind: type[Kind], name: str, text: str, label: str) -> Callable[[str], Kind]:
        metric = kind(f"cumulo:{name}", text, (*_LABELS, label), registry=self.registry)
        return lambda value: metric.labels(*self._values, value)

    # -- feeding them -------------------------------------------------------------------------------------
    def on_progress(self, stats: Stats) -> None:
        self._now = stats
        for record in stats.records:
            self.iteration_tokens.observe(record.prefill_tokens + record.decode_tokens)
            self.step.observe(record.finished_s - record.started_s)
        if stats.fairness is not None:
            self._on_fairness(stats.fairness)
        if stats.tiers is not None:
            self._on_tiers(stats.tiers)

    def _on_tiers(self, one: TierStats) -> None:
        self._tier_blocks("host").set(one.host_blocks_used)
        self._tier_blocks("disk").set(one.disk_blocks)
        self._tier_bytes.set(one.disk_bytes)
        for name, metric, value in (
            ("host", self._tier_tokens, one.host_hit_tokens),
            ("disk", self._tier_tokens, one.disk_hit_tokens),
            ("device to host", self._tier_moves, one.spilled_blocks),
            ("host to device", self._tier_moves, one.fetched_blocks),
            ("host to disk", self._tier_moves, one.written_blocks),
            ("disk to host", self._tier_moves, one.read_blocks),
            ("failed write", self._tier_moves, one.failed_writes),
            ("bad file", self._tier_moves, one.bad_files),
        ):
            # A new engine process counts from 0 again; so do the engines of a fleet, each for itself.
            metric(name).inc(max(0, value - self._tiers_told.get(name, 0)))
            self._tiers_told[name] = value

    def _on_fairness(self, report: FairnessReport) -> None:
        self.fairness.set(report.index)
        for key, prompt_tokens, output_tokens in report.served:
            name = key or "anyone"
            if name not in self._tenants:
                if len(self._tenants) < MOST_TENANTS:
                    self._tenants[name] = f"key-{len(self._tenants) + 1}"
                else:
                    name = OTHER_TENANTS
            for kind, tokens in (("prompt", prompt_tokens), ("output", output_tokens)):
                self._tenant_tokens.labels(*self._values, name, kind).inc(tokens)

    def on_ready(self, info: Ready) -> None:
        """An engine is up: what it planned to hold, over what it holds. Parts it has not measured are left out."""
        if info is self._ledger_of:
            return
        self._ledger_of = info
        self._ledger.clear()
        for row in info.ledger["rows"]:
            if row["measured_bytes"]:
                ratio = row["predicted_bytes"] / row["measured_bytes"]
                self._ledger.labels(*self._values, row["name"].replace(" ", "_")).set(ratio)

    def on_refusal(self, reason: str) -> None:
        """By the HTTP transport: before anything looked at the request."""
        self._refused(reason).inc()

    def on_response(self, status: int) -> None:
        self._http(str(status)).inc()

    def on_end(self, record: Record) -> None:
        self._success(record.outcome or "error").inc()
        story = record.story
        if story is None:
            return
        self.prompt_tokens.inc(record.prompt_tokens)
        self.request_prompt.observe(record.prompt_tokens)
        self.request_output.observe(story.output_tokens)
        self.request_n.observe(record.samples)
        self.recomputed.inc(story.recomputed_tokens)
        self.drafted.inc(story.drafted_tokens)
        self.accepted.inc(story.accepted_tokens)
        self.drafted_tokens += story.drafted_tokens
        self.accepted_tokens += story.accepted_tokens
        if record.ended_s is not None:
            self.whole.observe(record.ended_s - record.received_s)
        if story.admitted_s is not None:
            self.prefix_queries.inc(record.prompt_tokens)
            self.prefix_hits.inc(story.cached_tokens)
            self.queue.observe(story.admitted_s - story.arrived_s)
            if story.finished_s is not None:
                self.inference.observe(story.finished_s - story.admitted_s)
        if record.ttft_s is not None:
            self.ttft.observe(record.ttft_s)
        if story.first_token_s is not None and story.admitted_s is not None:
            self.prefill.observe(story.first_token_s - story.admitted_s)
            if story.finished_s is not None:
                self.decode.observe(story.finished_s - story.first_token_s)
        if record.decode_tok_s:
            self.per_token.observe(record.samples / record.decode_tok_s)
        if (itl_s := kept_itl_s(record.itls_s)) is not None:
            self.kept_itl.observe(itl_s)
        if story.promise is not None and story.first_token_s is not None:
            self.promises(story.promise.outcome(story.ttft_s)).inc()
        for cause, seconds in story.waits_s.items():
            self._wait_by(cause).inc(seconds)
        for event in story.events:
            if event.kind == "preempted":
                self.preempted.inc()
                self._preempted_by(event.detail["cause"]).inc()

    def text(self, with_names: bool = True, with_adapters: bool = True) -> bytes:
        """`with_names`: of API keys. Without, they are numbered in the order they were first seen. `with_adapters`:
        what has the name of an adapter is shown, too."""
        if with_names and with_adapters:
            return generate_latest(self.registry)
        return generate_latest(_Unnamed(self.registry, self._tenants, with_names, with_adapters))


class _Unnamed(CollectorRegistry):
    """The metrics of a registry with numbers in place of the tenants' names, or without adapters."""

    def __init__(
        self, registry: CollectorRegistry, numbers: Mapping[str, str], names: bool, adapters: bool
    ) -> None:
        super().__init__()
        self._named, self._numbers, self._names, self._adapters = registry, numbers, names, adapters

    def collect(self) -> Iterator[Metric]:
        for metric in self._named.collect():
            metric.samples = [
                sample._replace(labels=sample.labels | {"tenant": self._numbers.get(tenant, OTHER_TENANTS)})
                if not self._names and (tenant := sample.labels.get("tenant")) is not None
                else sample
                for sample in metric.samples
                if self._adapters or "adapter" not in sample.labels  # /v1/models asks for a key, too
            ]
            yield metric
