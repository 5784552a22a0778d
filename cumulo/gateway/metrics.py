"""Metrics of the gateway, in Prometheus' format: what passes, what moves, and how the replicas are."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cumulo.gateway.replica import UpstreamReplica
from cumulo.gateway.replicas import Replicas
from cumulo.gateway.stories import PassedRecord

_FIRST_BYTE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PAUSE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class GatewayMetrics:
    def __init__(self, fleet: Replicas) -> None:
        registry = self._registry = CollectorRegistry()
        self.responses = Counter(
            "cumulo_gateway_responses", "Answers by status.", ["status"], registry=registry
        )
        self.moves = Counter(
            "cumulo_gateway_moves", "Times that a request was sent to another replica.", registry=registry
        )
        self.continued = Counter(
            "cumulo_gateway_continued_streams", "Streams that another replica continued.", registry=registry
        )
        self.lost = Counter(
            "cumulo_gateway_failed_requests",
            "Requests that no replica answered to the end.",
            registry=registry,
        )
        self.first_byte = Histogram(
            "cumulo_gateway_first_byte_seconds",
            "Until an answer begins.",
            buckets=_FIRST_BYTE_S,
            registry=registry,
        )
        self.pauses = Histogram(
            "cumulo_gateway_move_pause_seconds", "Longest pause in streams that moved.", buckets=_PAUSE_S,
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("cumulo_gateway_prompt_tokens", "Prompt tokens.", registry=registry)
        self.cached_tokens = Counter(
            "cumulo_gateway_cached_tokens",
            "Prompt tokens found in the replicas' caches.",
            registry=registry,
        )
        self.in_flight = Gauge(
            "cumulo_gateway_in_flight", "Requests that are being answered.", registry=registry
        )
        self.connections = Gauge(
            "cumulo_gateway_connections", "Open connections of clients.", registry=registry
        )
        self.refusals = Counter(
            "cumulo_gateway_refusals", "What the transport refused, by reason.", ["reason"], registry=registry
        )
        registry.register(_Replicas(fleet))

    def on_end(self, record: PassedRecord, status: int) -> None:
        self.responses.labels(str(status)).inc()
        if record.first_sent_s is not None:
            self.first_byte.observe(record.first_sent_s - record.received_s)
        self.moves.inc(record.moves)
        if record.error is not None:
            self.lost.inc()
        elif record.moves and record.stream:
            self.continued.inc()
            self.pauses.observe(record.longest_pause_s)
        self.prompt_tokens.inc(record.prompt_tokens or 0)
        self.cached_tokens.inc(record.cached_tokens or 0)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Replicas(Collector):
    """Read when they are asked for: replicas come and go."""

    def __init__(self, fleet: Replicas) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now_s, replicas = time.monotonic(), list(self._fleet.replicas.values())
        told: tuple[tuple[str, str, Callable[[UpstreamReplica], float]], ...] = (
            ("up", "1: it takes requests.", lambda one: float(not one.refuses(now_s))),
            ("breaker_open", "1: it failed too often and is left alone.", lambda one: float(
                one.breaker.state(now_s) == "open")),
            ("in_flight", "Requests of this gateway there.", lambda one: float(len(one.works))),
            ("running", "Sequences that run there.", lambda one: float(one.news.running)),
            ("waiting", "Sequences that wait there.", lambda one: float(one.news.waiting)),
            ("known_blocks", "KV blocks that it has told.", lambda one: float(len(one.blocks))),
            ("requests", "Requests sent there so far.", lambda one: float(one.requests)),
            ("failures", "Requests that failed there so far.", lambda one: float(one.failures)),
        )  # fmt: skip
        for name, help_text, value in told:
            family = GaugeMetricFamily(f"cumulo_gateway_replica_{name}", help_text, labels=["replica"])
            for replica in replicas:
                family.add_metric([replica.name], value(replica))
            yield family
