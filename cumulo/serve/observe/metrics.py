"""Metrics: what /metrics shows, in Prometheus' format. Fed by Service with what passes through it.

Names and labels are vLLM's with `cumulo:` in place of `vllm:`, so that a dashboard ports by replacing a prefix;
after them comes what vLLM does not have: why requests wait, why they are preempted, what was recomputed, how
evenly tenants are served, and how far the memory plan's predictions were off.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from cumulo.base.strict import package_yaml
from cumulo.serve.engine_link.messages import FairnessReport, Ready, Stats, TierStats
from cumulo.serve.observe.stories import Record
from cumulo.spec.slo import kept_itl_s

MOST_TENANTS = 100  # that have a series of their own
OTHER_TENANTS = "(others)"
_LABELS = ("model_name", "engine")
_KINDS: dict[str, type[Any]] = {"counters": Counter, "gauges": Gauge, "histograms": Histogram, "now": Gauge}
# What the engine said last: read when somebody asks.
_OF_NOW: dict[str, Callable[[Stats], float]] = {
    "num_requests_running": lambda now: now.running,
    "num_requests_waiting": lambda now: now.waiting,
    "kv_cache_usage_perc": lambda now: now.blocks_used / now.blocks_total,
    "prefix_cache_blocks": lambda now: now.blocks_cached,
}


class Metrics:
    def __init__(self, model_name: str, beside: "Metrics | None" = None) -> None:
        """`beside`: of another model of the same server, which has the same metrics."""
        self._values = model_name, "0"
        self.registry: CollectorRegistry = beside.registry if beside is not None else CollectorRegistry()
        self._metrics: dict[str, Any] = beside._metrics if beside is not None else _registered(self.registry)
        # Names with a series of their own: what others see instead.
        self._tenants: dict[str, str] = beside._tenants if beside is not None else {}
        for name, _, one in _table():
            if "labels" not in one:
                self.series(name)  # it is shown before it has counted anything
        for name, read in _OF_NOW.items():
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


def _table() -> Iterator[tuple[str, type[Any], dict[str, Any]]]:
    """The metrics of metrics.yaml: name, kind, and what is said of each."""
    content = package_yaml("cumulo.serve.observe", "metrics.yaml")
    return ((name, kind, one) for section, kind in _KINDS.items() for name, one in content[section].items())


def _registered(registry: CollectorRegistry) -> dict[str, Any]:
    """The metrics by name."""
    found: dict[str, Any] = {}
    for name, kind, one in _table():
        labels, buckets = (
            (*_LABELS, *one.get("labels", ())),
            {key: one[key] for key in ("buckets",) if key in one},
        )
        found[name] = kind(f"cumulo:{name}", one["help"], labels, registry=registry, **buckets)
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
