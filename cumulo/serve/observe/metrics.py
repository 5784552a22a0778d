"""Metrics: what /metrics shows, in Prometheus' format. Fed by Service with what passes through it.

Names and labels are vLLM's with `cumulo:` in place of `vllm:`, so that a dashboard ports by replacing a prefix;
after them comes what vLLM does not have: why requests wait, why they are preempted, what was recomputed, how
evenly tenants are served, and how far the memory plan's predictions were off.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from cumulo.serve.engine_link.messages import FairnessReport, Ready, Stats, TierStats
from cumulo.serve.observe.stories import Record
from cumulo.spec.slo import kept_itl_s

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
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

# What the engine said last: read when somebody asks.
_OF_NOW: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("num_requests_running", "Number of sequences that the engine is computing.", lambda now: now.running),
    ("num_requests_waiting", "Number of sequences that wait to be admitted.", lambda now: now.waiting),
    ("kv_cache_usage_perc", "Share of the KV blocks that are in use, from 0 to 1.",
     lambda now: now.blocks_used / now.blocks_total),
    ("prefix_cache_blocks", "Number of KV blocks in the prefix cache.", lambda now: now.blocks_cached),
)  # fmt: skip
# name, help, and the labels that it has beside the model's and the engine's
_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("prefix_cache_queries", "Number of prompt tokens that were looked up in the prefix cache.", ()),
    ("prefix_cache_hits", "Number of prompt tokens that were found in the prefix cache.", ()),
    ("num_preemptions", "Number of times a sequence was preempted.", ()),
    ("prompt_tokens", "Number of prompt tokens of requests that have ended.", ()),
    ("generation_tokens", "Number of tokens that were generated.", ()),
    ("request_success", "Number of requests that have ended, by reason.", ("finished_reason",)),
    ("spec_decode_num_draft_tokens", "Number of tokens drafted by speculation.", ()),
    ("spec_decode_num_accepted_tokens", "Number of drafted tokens that were accepted.", ()),
    # what vLLM does not have
    ("preemptions_by_reason", "Number of preemptions, by what needed the KV blocks.", ("reason",)),
    ("recomputed_tokens", "Number of tokens that were computed again after preemptions.", ()),
    ("wait_seconds", "Seconds that requests waited, by what they waited for.", ("reason",)),
    ("tenant_tokens", "Number of prompt tokens computed and output tokens drawn, by API key.", ("tenant", "kind")),
    ("slo_requests", "Number of requests with an SLO that was kept, missed or refused.", ("outcome",)),
    ("lora_requests", "Number of calls that were answered with an adapter, by its name.", ("adapter",)),
    ("kv_tier_hits", "Number of prompt tokens found in a KV tier beyond the device.", ("tier",)),
    ("kv_tier_moved_blocks", "Number of KV blocks moved between tiers, by direction.", ("way",)),
    ("requests_moved", "Number of requests that another replica has taken over.", ()),
    ("batch_requests", "Number of requests of batches that have ended, by outcome.", ("outcome",)),
    ("http_responses", "Number of HTTP responses, by status.", ("status",)),
    ("connections_refused", "Number of requests refused and connections closed, by reason.", ("reason",)),
)  # fmt: skip
_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("fairness_index", "Jain's fairness index of the last minute's service to API keys; 1 is even.", ()),
    ("ledger_predicted_over_measured", "Planned memory over measured memory, by component.", ("component",)),
    ("lora_adapters", "Number of adapters that requests can name.", ()),
    ("kv_tier_blocks", "Number of KV blocks that a tier holds.", ("tier",)),
    ("kv_disk_bytes", "Bytes of the files in the folder of --kv-disk.", ()),
    ("batches", "Number of batches, by status.", ("status",)),
    ("connections", "Number of open connections, WebSockets of the console included.", ()),
    ("log_lines_lost", "Number of log lines that standard error did not take.", ()),
    ("engine_restarts", "Number of times the engine process was replaced.", ()),
    ("engine_up", "Whether the engine process is ready (1) or not (0).", ()),
)  # fmt: skip
# name, help, buckets
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("iteration_tokens_total", "Number of tokens that a step computes.", _TOKENS),
    ("time_to_first_token_seconds", "Time from a request's arrival to its first token.", _FIRST_TOKEN_S),
    ("inter_token_latency_seconds", "Time between two tokens of a streamed answer.", _BETWEEN_TOKENS_S),
    ("request_time_per_output_token_seconds", "Mean time per output token of a request.", _BETWEEN_TOKENS_S),
    ("e2e_request_latency_seconds", "Time from a request's arrival to its end.", _WHOLE_REQUEST_S),
    ("request_queue_time_seconds", "Time that a request waits to be admitted.", _WHOLE_REQUEST_S),
    ("request_inference_time_seconds", "Time from a request's admission to its end.", _WHOLE_REQUEST_S),
    ("request_inter_token_latency_seconds",
     "Latency within which 99% of the streamed tokens of a request came after the one before.", _BETWEEN_TOKENS_S),
    ("request_prefill_time_seconds", "Time from a request's admission to its first token.", _WHOLE_REQUEST_S),
    ("request_decode_time_seconds", "Time from a request's first token to its end.", _WHOLE_REQUEST_S),
    ("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    ("request_generation_tokens", "Output tokens of a request.", _TOKENS),
    ("request_params_n", "Number of answers that a request asks for.", (1, 2, 5, 10, 20)),
    ("route_ttft_predicted_over_measured", "The TTFT that the router expected, over the measured one.", _RATIOS),
    ("step_duration_seconds", "Time that the runner takes for a step.", _BETWEEN_TOKENS_S),
)  # fmt: skip


class Metrics:
    def __init__(self, model_name: str, beside: "Metrics | None" = None) -> None:
        """`beside`: of another model of the same server, which has the same metrics."""
        self._values = model_name, "0"
        self.registry: CollectorRegistry = beside.registry if beside is not None else CollectorRegistry()
        self._metrics: dict[str, Any] = beside._metrics if beside is not None else _registered(self.registry)
        # Names with a series of their own: what others see instead.
        self._tenants: dict[str, str] = beside._tenants if beside is not None else {}
        plain = [name for name, _, labels in (*_COUNTERS, *_GAUGES) if not labels]
        for name in (*plain, *(name for name, *_ in _HISTOGRAMS)):
            self.series(name)  # it is shown before it has counted anything
        for name, _, read in _OF_NOW:
            self.series(name).set_function(partial(self._of_now, read))
        self._now: Stats | None = None
        self.series("fairness_index").set(1)
        self._ledger_of: Ready | None = None
        self._components: set[str] = set()  # that its ledger has measured
        self._tiers_told: dict[str, int] = {}
        self.drafted_tokens = self.accepted_tokens = self.requests_moved = 0  # for the console

    def series(self, name: str, *labels: str) -> Any:
        """The counter, gauge or histogram of this name, with these values of its own labels."""
        return self._metrics[name].labels(*self._values, *labels)

    def _of_now(self, read: Callable[[Stats], float]) -> float:
        return float(read(self._now)) if self._now is not None else 0.0

    # -- feeding them -------------------------------------------------------------------------------------
    def on_progress(self, stats: Stats) -> None:
        self._now = stats
        for record in stats.records:
            self.series("iteration_tokens_total").observe(record.prefill_tokens + record.decode_tokens)
            self.series("step_duration_seconds").observe(record.finished_s - record.started_s)
        if stats.fairness is not None:
            self._on_fairness(stats.fairness)
        if stats.tiers is not None:
            self._on_tiers(stats.tiers)

    def _on_tiers(self, one: TierStats) -> None:
        self.series("kv_tier_blocks", "host").set(one.host_blocks_used)
        self.series("kv_tier_blocks", "disk").set(one.disk_blocks)
        self.series("kv_disk_bytes").set(one.disk_bytes)
        counts = one.counts
        for name, metric, value in (
            ("host", "kv_tier_hits", counts.host_hit_tokens),
            ("disk", "kv_tier_hits", counts.disk_hit_tokens),
            ("device to host", "kv_tier_moved_blocks", counts.spilled_blocks),
            ("host to device", "kv_tier_moved_blocks", counts.fetched_blocks),
            ("host to disk", "kv_tier_moved_blocks", counts.written_blocks),
            ("disk to host", "kv_tier_moved_blocks", counts.read_blocks),
            ("failed write", "kv_tier_moved_blocks", counts.failed_writes),
            ("bad file", "kv_tier_moved_blocks", counts.bad_files),
        ):
            # A new engine process counts from 0 again; so do the engines of a fleet, each for itself.
            self.series(metric, name).inc(max(0, value - self._tiers_told.get(name, 0)))
            self._tiers_told[name] = value

    def _on_fairness(self, report: FairnessReport) -> None:
        self.series("fairness_index").set(report.index)
        for key, prompt_tokens, output_tokens in report.served:
            name = key or "anyone"
            if name not in self._tenants:
                if len(self._tenants) < MOST_TENANTS:
                    self._tenants[name] = f"key-{len(self._tenants) + 1}"
                else:
                    name = OTHER_TENANTS
            for kind, tokens in (("prompt", prompt_tokens), ("output", output_tokens)):
                self.series("tenant_tokens", name, kind).inc(tokens)

    def on_ready(self, info: Ready) -> None:
        """An engine is up: what it planned to hold, over what it holds. Parts it has not measured are left out."""
        if info is self._ledger_of:
            return
        self._ledger_of = info
        for component in self._components:
            self._metrics["ledger_predicted_over_measured"].remove(*self._values, component)
        self._components.clear()
        for row in info.ledger["rows"]:
            if row["measured_bytes"]:
                ratio = row["predicted_bytes"] / row["measured_bytes"]
                component = row["name"].replace(" ", "_")
                self._components.add(component)
                self.series("ledger_predicted_over_measured", component).set(ratio)

    def on_refusal(self, reason: str) -> None:
        """By the HTTP transport: before anything looked at the request."""
        self.series("connections_refused", reason).inc()

    def on_response(self, status: int) -> None:
        self.series("http_responses", str(status)).inc()

    def on_end(self, record: Record) -> None:
        self.series("request_success", record.outcome or "error").inc()
        moves = max(0, len(record.dispatches) - 1)
        self.requests_moved += moves
        self.series("requests_moved").inc(moves)
        story = record.story
        if story is None:
            return
        self.series("prompt_tokens").inc(record.prompt_tokens)
        self.series("request_prompt_tokens").observe(record.prompt_tokens)
        self.series("request_generation_tokens").observe(story.output_tokens)
        self.series("request_params_n").observe(record.samples)
        self.series("recomputed_tokens").inc(story.recomputed_tokens)
        self.series("spec_decode_num_draft_tokens").inc(story.drafted_tokens)
        self.series("spec_decode_num_accepted_tokens").inc(story.accepted_tokens)
        self.drafted_tokens += story.drafted_tokens
        self.accepted_tokens += story.accepted_tokens
        if record.ended_s is not None:
            self.series("e2e_request_latency_seconds").observe(record.ended_s - record.received_s)
        if story.admitted_s is not None:
            self.series("prefix_cache_queries").inc(record.prompt_tokens)
            self.series("prefix_cache_hits").inc(story.cached_tokens)
            self.series("request_queue_time_seconds").observe(story.admitted_s - story.arrived_s)
            if story.finished_s is not None:
                self.series("request_inference_time_seconds").observe(story.finished_s - story.admitted_s)
        if record.ttft_s is not None:
            self.series("time_to_first_token_seconds").observe(record.ttft_s)
            if len(record.dispatches) == 1 and record.ttft_s:  # it stayed where it was sent
                expected_s = record.dispatches[0].route.ttft_s
                self.series("route_ttft_predicted_over_measured").observe(expected_s / record.ttft_s)
        if story.first_token_s is not None and story.admitted_s is not None:
            self.series("request_prefill_time_seconds").observe(story.first_token_s - story.admitted_s)
            if story.finished_s is not None:
                self.series("request_decode_time_seconds").observe(story.finished_s - story.first_token_s)
        if record.decode_tok_s:
            self.series("request_time_per_output_token_seconds").observe(record.samples / record.decode_tok_s)
        if (itl_s := kept_itl_s(record.itls_s)) is not None:
            self.series("request_inter_token_latency_seconds").observe(itl_s)
        if story.promise is not None and story.first_token_s is not None:
            self.series("slo_requests", story.promise.outcome(story.ttft_s)).inc()
        for cause, seconds in story.waits_s.items():
            self.series("wait_seconds", cause).inc(seconds)
        for event in story.events:
            if event.kind == "preempted":
                self.series("num_preemptions").inc()
                self.series("preemptions_by_reason", event.detail["cause"]).inc()

    def text(self, with_names: bool = True, with_adapters: bool = True) -> bytes:
        """`with_names`: of API keys. Without, they are numbered in the order they were first seen. `with_adapters`:
        what has the name of an adapter is shown, too."""
        if with_names and with_adapters:
            return generate_latest(self.registry)
        return generate_latest(_Unnamed(self.registry, self._tenants, with_names, with_adapters))


def _registered(registry: CollectorRegistry) -> dict[str, Any]:
    """The metrics by name."""
    found: dict[str, Any] = {}
    for kind, table in ((Counter, _COUNTERS), (Gauge, _GAUGES)):
        for name, text, labels in table:
            found[name] = kind(f"cumulo:{name}", text, (*_LABELS, *labels), registry=registry)
    for name, text, buckets in _HISTOGRAMS:
        found[name] = Histogram(f"cumulo:{name}", text, _LABELS, registry=registry, buckets=buckets)
    for name, text, _ in _OF_NOW:
        found[name] = Gauge(f"cumulo:{name}", text, _LABELS, registry=registry)
    return found


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
