"""replica_metrics and rank_metrics: what /metrics shows of each replica and of each rank. Made by Service.

Both are read from the engines' last reports when somebody asks: counting costs no request anything. The other
metrics are sums over all replicas, under the names that one engine has.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cumulo.ranks.rank_meter import RankState

Row = TypeVar("Row")
ReplicaMetric = tuple[str, type[Any], str, Callable[[dict[str, Any]], float]]
# name, kind, help, how it is read from a replica's report in /v1/fleet: those that a gateway has, too
OF_ANY_REPLICA: tuple[ReplicaMetric, ...] = (
    ("replica_up", GaugeMetricFamily, "Whether the replica takes requests (1) or not (0).",
     lambda one: one["state"] == "ready"),
    ("replica_draining", GaugeMetricFamily, "Whether the replica is draining (1) or not (0).",
     lambda one: one["state"] == "draining"),
    ("replica_running", GaugeMetricFamily, "Number of sequences that the replica is computing.",
     lambda one: one["running"]),
    ("replica_waiting", GaugeMetricFamily, "Number of sequences that wait to be admitted.",
     lambda one: one["waiting"]),
    ("replica_waiting_tokens", GaugeMetricFamily, "Number of prompt tokens that are not computed yet.",
     lambda one: one["waiting_tokens"]),
    ("replica_requests", CounterMetricFamily, "Number of requests that the router gave the replica.",
     lambda one: one["requests"]),
)  # fmt: skip
_PER_REPLICA: tuple[ReplicaMetric, ...] = (
    *OF_ANY_REPLICA,
    ("replica_kv_usage", GaugeMetricFamily, "Share of the replica's KV blocks that are in use, from 0 to 1.",
     lambda one: one["blocks"]["used"] / max(1, one["blocks"]["total"])),
    ("replica_cached_blocks", GaugeMetricFamily, "Number of KV blocks in the replica's prefix cache.",
     lambda one: one["blocks"]["cached"]),
    ("replica_restarts", GaugeMetricFamily, "Number of times its engine process was replaced after a failure.",
     lambda one: one["restarts"]),
    ("replica_prompt_tokens", CounterMetricFamily, "Number of prompt tokens of those requests.",
     lambda one: one["prompt_tokens"]),
    ("replica_cached_tokens", CounterMetricFamily, "Number of those tokens that the router found in its cache.",
     lambda one: one["cached_tokens"]),
    ("kv_transfers", CounterMetricFamily, "Number of prompts whose KV arrived from a prefill engine.",
     lambda one: _transfer(one, "received")),
    ("kv_transfers_failed", CounterMetricFamily, "Number of prompts whose KV did not arrive from a prefill engine.",
     lambda one: _transfer(one, "failed")),
    ("kv_transfer_bytes", CounterMetricFamily, "Bytes of KV that arrived from prefill engines.",
     lambda one: _transfer(one, "received_bytes")),
    ("kv_transfers_now", GaugeMetricFamily, "Number of prompts that prefill engines are computing for the replica.",
     lambda one: _transfer(one, "receiving")),
)  # fmt: skip
_PER_RANK: tuple[tuple[str, type[Any], str, Callable[[RankState], float]], ...] = (
    ("rank_memory_bytes", GaugeMetricFamily, "Memory of the rank's process, or what it holds on its GPU.",
     lambda one: one.memory_bytes),
    ("rank_steps", CounterMetricFamily, "Number of steps that the rank computed.", lambda one: one.steps),
    ("rank_step_seconds", CounterMetricFamily, "Seconds that the rank spent in steps, waiting included.",
     lambda one: one.step_s),
    ("rank_wait_seconds", CounterMetricFamily, "Seconds that the rank waited for other ranks in steps (CPU only).",
     lambda one: one.wait_s),
    ("rank_expert_tokens", CounterMetricFamily, "Number of times a token was routed to an expert of this rank.",
     lambda one: one.routed_tokens),
)  # fmt: skip


def _transfer(one: dict[str, Any], name: str) -> float:
    return float((one["transfers"] or {}).get(name) or 0)


class TableMetrics(Collector):
    """Metrics that are read when somebody asks: one for each line of a table (name, kind, help, how it is read),
    with a value for each row, which begins with its labels."""

    def __init__(
        self,
        registry: CollectorRegistry,
        table: Iterable[tuple[str, type[Any], str, Callable[[Row], float]]],
        labels: Sequence[str],
        rows: Callable[[], Iterable[tuple[Sequence[str], Row]]],
    ) -> None:
        self._table, self._labels, self._rows = table, labels, rows
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # nobody need look at the rows to register them

    def collect(self) -> Iterable[Metric]:
        rows = list(self._rows())
        for name, kind, text, read in self._table:
            family = kind(f"cumulo:{name}", text, labels=self._labels)
            for values, one in rows:
                family.add_metric(values, float(read(one)))
            yield family


def replica_metrics(
    registry: CollectorRegistry, model_name: str, report: Callable[[], list[dict[str, Any]]]
) -> None:
    """`report` gives what /v1/fleet says of each replica."""
    TableMetrics(
        registry,
        _PER_REPLICA,
        ("model_name", "replica"),
        lambda: [((model_name, one["name"]), one) for one in report()],
    )


def rank_metrics(
    registry: CollectorRegistry, model_name: str, report: Callable[[], Mapping[str, Sequence[RankState]]]
) -> None:
    """`report` gives the ranks of each engine, by the engine's name."""
    TableMetrics(
        registry,
        _PER_RANK,
        ("model_name", "replica", "rank"),
        lambda: [
            ((model_name, engine, str(one.rank)), one) for engine, ranks in report().items() for one in ranks
        ],
    )
