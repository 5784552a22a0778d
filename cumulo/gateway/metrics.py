"""Metrics of the gateway, in Prometheus' format: what passes, what moves, and how the replicas are.

Answers and replicas have the names that they have in a server with several replicas (serve/observe), so that its
alerts and panels hold for a gateway, too.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from cumulo.fleet.remote.replicas import Replicas
from cumulo.gateway.stories import ProxiedRecord
from cumulo.serve.observe.fleet_metrics import OF_ANY_REPLICA, ReplicaMetric, TableMetrics

_FIRST_BYTE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PAUSE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PER_REPLICA: tuple[ReplicaMetric, ...] = (
    *OF_ANY_REPLICA,
    ("gateway_replica_in_flight", GaugeMetricFamily, "Number of requests of this gateway on the replica.",
     lambda one: one["in_flight"]),
    ("gateway_replica_failures", CounterMetricFamily, "Number of requests that failed on the replica.",
     lambda one: one["failures"]),
    ("gateway_replica_breaker_open", GaugeMetricFamily,
     "Whether the replica is left alone after failures (1) or not (0).",
     lambda one: one["breaker"] == "open"),
)  # fmt: skip


class GatewayMetrics:
    def __init__(self, fleet: Replicas) -> None:
        self._fleet = fleet
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cumulo:{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"cumulo:{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"cumulo:{name}", text, buckets=buckets, registry=registry)

        self._responses = counter("http_responses", "Answers sent, by status.", "model_name", "status")
        self._moved = counter("requests_moved", "Requests that another replica has taken over.", "model_name")
        self._continued = counter("gateway_continued_streams", "Streams that another replica continued.")
        self._lost = counter("gateway_failed_requests", "Requests that no replica answered to the end.")
        self._prompt_tokens = counter("gateway_prompt_tokens", "Prompt tokens, as replicas counted them.")
        self._cached_tokens = counter(
            "gateway_cached_tokens", "Of those, tokens found in the replicas' caches."
        )
        self._first_byte = histogram("gateway_first_byte_seconds", "Until an answer begins.", _FIRST_BYTE_S)
        self._pauses = histogram("gateway_move_pause_seconds", "Longest pause in a moved stream.", _PAUSE_S)
        self.in_flight = gauge("gateway_in_flight", "Requests that are being answered.")
        self.connections = gauge("connections", "Open connections of clients.")
        self.refusals = counter("connections_refused", "Requests refused and connections closed.", "reason")
        self._answered_count = self._moved_count = self._failed_count = 0  # the same, for the page
        TableMetrics(
            registry,
            _PER_REPLICA,
            ("model_name", "replica"),
            lambda: [
                ((",".join(one.models), one.short_name), one.described()) for one in fleet.replicas.values()
            ],
        )

    def on_end(self, record: ProxiedRecord, status: int) -> None:
        # A name that a client made up is no label.
        model = record.model if record.model in self._fleet.models() else ""
        self._responses.labels(model, str(status)).inc()
        self._moved.labels(model).inc(record.moves)
        self._answered_count += 1
        self._moved_count += record.moves
        self._failed_count += record.error is not None
        if record.first_sent_s is not None:
            self._first_byte.observe(record.first_sent_s - record.received_s)
        if record.error is not None:
            self._lost.inc()
        elif record.moves and record.stream:
            self._continued.inc()
            self._pauses.observe(record.longest_pause_s)
        self._prompt_tokens.inc(record.prompt_tokens or 0)
        self._cached_tokens.inc(record.cached_tokens or 0)

    def totals(self) -> dict[str, int]:
        """Counts of all replicas together, since the gateway started."""
        return {
            "in_flight": sum(len(one.works) for one in self._fleet.replicas.values()),
            "answered": self._answered_count,
            "moved": self._moved_count,
            "failed": self._failed_count,
        }

    def text(self) -> bytes:
        return generate_latest(self._registry)
