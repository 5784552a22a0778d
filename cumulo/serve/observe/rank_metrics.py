"""RankMetrics: what /metrics shows of each rank of an engine that runs over several, by the labels `replica` and
`rank`. Made by Service; read from the engines' last reports when somebody asks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cumulo.ranks.rank_meter import RankState

_LABELS = ("model_name", "replica", "rank")
_PER_RANK: tuple[tuple[str, type[Any], str, Callable[[RankState], float]], ...] = (
    ("rank_memory_bytes", GaugeMetricFamily, "Memory of its process, or what it holds on its GPU.",
     lambda one: one.memory_bytes),
    ("rank_steps", CounterMetricFamily, "Steps that it played.", lambda one: one.steps),
    ("rank_step_seconds", CounterMetricFamily, "Seconds in steps, with what it waited.",
     lambda one: one.step_s),
    ("rank_wait_seconds", CounterMetricFamily, "Of these, seconds that it waited for other ranks (CPU ranks).",
     lambda one: one.wait_s),
    ("rank_expert_tokens", CounterMetricFamily, "Choices of tokens that fell on experts of this rank.",
     lambda one: one.routed_tokens),
)  # fmt: skip


class RankMetrics(Collector):
    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        report: Callable[[], Mapping[str, Sequence[RankState]]],
    ) -> None:
        """`report`: the ranks of each engine, by its name."""
        self._model_name, self._report = model_name, report
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # nobody need look at ranks to register them

    def collect(self) -> Iterable[Metric]:
        engines = self._report()
        for name, kind, text, read in _PER_RANK:
            family = kind(f"cumulo:{name}", text, labels=_LABELS)
            for engine, ranks in engines.items():
                for one in ranks:
                    family.add_metric((self._model_name, engine, str(one.rank)), float(read(one)))
            yield family
