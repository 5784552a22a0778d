"""QuickCounter and QuickHistogram: series that are fed with every token, step and request. Made by Metrics.

Prometheus' own take a lock for every number, because any thread may feed them. These are fed by the event loop's
thread only, so counting is an addition; what Prometheus reads is made when it asks, and looks the same.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = Sequence[tuple[str, str]]  # names and values


class QuickCounter(Collector):
    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Labels) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._value, self._created_s = 0.0, time.time()
        registry.register(self)

    def inc(self, amount: float = 1) -> None:
        self._value += amount

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text)]

    def collect(self) -> Iterable[Metric]:
        names, values = zip(*self._labels, strict=True)
        family = CounterMetricFamily(self._name, self._text, labels=names)
        family.add_metric(values, self._value, created=self._created_s)
        yield family


class QuickHistogram(Collector):
    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, labels: Labels, bounds: Sequence[float]
    ) -> None:
        """`bounds`: the largest value of each bucket, ascending; one without an end follows."""
        self._name, self._text, self._labels = name, text, labels
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum, self._created_s = 0.0, time.time()
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text)]

    def collect(self) -> Iterable[Metric]:
        names, values = zip(*self._labels, strict=True)
        family = HistogramMetricFamily(self._name, self._text, labels=names)
        ends = [str(floatToGoString(end)) for end in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        family.add_metric(values, list(zip(ends, accumulate(self._counts), strict=True)), self._sum)
        family.add_sample(f"{self._name}_created", dict(self._labels), self._created_s)
        yield family
