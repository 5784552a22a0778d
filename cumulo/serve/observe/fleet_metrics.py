"""FleetMetrics: what /metrics shows of each replica, by the label `replica`. Made by Service for a fleet.

Read from the fleet when somebody asks, so that counting costs no request anything. The other metrics are sums over
all replicas, under the names that one engine has.
"""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cumulo.serve.observe.stories import Record

_LABELS = ("model_name", "replica")
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
# name, kind, help, how it is read from a replica's report
_PER_REPLICA: tuple[tuple[str, type[Any], str, Callable[[dict[str, Any]], float]], ...] = (
    ("replica_up", GaugeMetricFamily, "1 while the replica takes requests.", lambda one: one["state"] == "ready"),
    ("replica_draining", GaugeMetricFamily, "1 while it drains.", lambda one: one["state"] == "draining"),
    ("replica_running", GaugeMetricFamily, "Sequences that compute.", lambda one: one["running"]),
    ("replica_waiting", GaugeMetricFamily, "Sequences that wait for room.", lambda one: one["waiting"]),
    ("replica_waiting_tokens", GaugeMetricFamily, "Prompt tokens that are not computed yet.",
     lambda one: one["waiting_tokens"]),
    ("replica_kv_usage", GaugeMetricFamily, "Share of its KV blocks in use; 1 is all.",
     lambda one: one["blocks"]["used"] / max(1, one["blocks"]["total"])),
    ("replica_cached_blocks", GaugeMetricFamily, "KV blocks that hold a prefix worth sharing.",
     lambda one: one["blocks"]["cached"]),
    ("replica_restarts", GaugeMetricFamily, "Times its engine process was replaced after a failure.",
     lambda one: one["restarts"]),
    ("replica_requests", CounterMetricFamily, "Requests that it was given.", lambda one: one["requests"]),
    ("replica_prompt_tokens", CounterMetricFamily, "Prompt tokens of those requests.",
     lambda one: one["prompt_tokens"]),
    ("replica_cached_tokens", CounterMetricFamily, "Of those, tokens that the router expected in its cache.",
     lambda one: one["cached_tokens"]),
    ("kv_transfers", CounterMetricFamily, "Prompts whose KV arrived from a prefill engine.",
     lambda one: _transfer(one, "received")),
    ("kv_transfers_failed", CounterMetricFamily, "... that did not arrive and were computed elsewhere.",
     lambda one: _transfer(one, "failed")),
    ("kv_transfer_bytes", CounterMetricFamily, "Bytes of KV that arrived from prefill engines.",
     lambda one: _transfer(one, "received_bytes")),
    ("kv_transfers_now", GaugeMetricFamily, "Prompts that prefill engines compute for it now.",
     lambda one: _transfer(one, "receiving")),
)  # fmt: skip


def _transfer(one: dict[str, Any], name: str) -> float:
    return float((one["transfers"] or {}).get(name) or 0)


class FleetMetrics(Collector):
    def __init__(
        self, registry: CollectorRegistry, model_name: str, report: Callable[[], list[dict[str, Any]]]
    ) -> None:
        """`report`: of each replica, what /v1/fleet says."""
        self._model_name, self._report = model_name, report
        self.moved = 0  # requests that another replica has taken over
        self._ratio = Histogram(
            "cumulo:route_ttft_predicted_over_measured",
            "The TTFT that the router expected, over the one that came.",
            ("model_name",),
            registry=registry,
            buckets=_RATIOS,
        ).labels(model_name)
        registry.register(self)

    def on_end(self, record: Record) -> None:
        """Of a request that stayed where it was sent, what was expected of the router's choice and what came."""
        self.moved += max(0, len(record.dispatches) - 1)
        measured_s = record.story.ttft_s if record.story is not None else None
        if len(record.dispatches) == 1 and measured_s:
            self._ratio.observe(record.dispatches[0].route.ttft_s / measured_s)

    def describe(self) -> Iterable[Metric]:
        return []  # nobody need look at replicas to register them

    def collect(self) -> Iterable[Metric]:
        replicas = self._report()
        for name, kind, text, read in _PER_REPLICA:
            family = kind(f"cumulo:{name}", text, labels=_LABELS)
            for one in replicas:
                family.add_metric((self._model_name, one["name"]), float(read(one)))
            yield family
        moved = CounterMetricFamily(
            "cumulo:requests_moved", "Requests that another replica has taken over.", labels=("model_name",)
        )
        moved.add_metric((self._model_name,), float(self.moved))
        yield moved
