"""Series without locks: Prometheus' own client is the oracle for what they show."""

import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from cumulo.serve.observe.quick_series import QuickCounter, QuickHistogram

_LABELS = (("model_name", 'a "model"'), ("engine", "0"))
_NAMES, _VALUES = zip(*_LABELS, strict=True)


def shown(registry: CollectorRegistry) -> str:
    """Without the moment at which a series was made."""
    return re.sub(r"(_created\{.*\}) .*", r"\1", generate_latest(registry).decode())


def test_a_histogram_shows_what_prometheus_shows() -> None:
    bounds, values = (0.002, 1, 2.5, 1000), (0.0, 0.002, 0.0021, 1, 1.5, 2.5, 7, 1000, 1000.1, 3e9)
    quick, slow = CollectorRegistry(), CollectorRegistry()
    ours = QuickHistogram(quick, "cumulo:time_seconds", "A time.", _LABELS, bounds)
    theirs = Histogram("cumulo:time_seconds", "A time.", _NAMES, registry=slow, buckets=bounds).labels(
        *_VALUES
    )
    assert shown(quick) == shown(slow)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    assert shown(quick) == shown(slow)


def test_a_counter_shows_what_prometheus_shows() -> None:
    quick, slow = CollectorRegistry(), CollectorRegistry()
    ours = QuickCounter(quick, "cumulo:tokens", "Tokens.", _LABELS)
    theirs = Counter("cumulo:tokens", "Tokens.", _NAMES, registry=slow).labels(*_VALUES)
    for amount in (1, 17, 0.5):
        ours.inc(amount)
        theirs.inc(amount)
    assert shown(quick) == shown(slow)


def test_two_series_of_one_name_are_refused() -> None:
    registry = CollectorRegistry()
    QuickCounter(registry, "cumulo:tokens", "Tokens.", _LABELS)
    with pytest.raises(ValueError, match="Duplicated"):
        Counter("cumulo:tokens", "Tokens.", _NAMES, registry=registry)
