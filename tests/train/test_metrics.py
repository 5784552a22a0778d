"""A run's figures for Prometheus, and the dashboard that shows them."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cumulo.train.run.log import CollectiveRecord, TrainRecord
from cumulo.train.run.metrics import COLLECTIVE_METRICS, STEP_METRICS, TrainMetrics

ROOT = Path(__file__).parents[2]
NAMES = {f"cumulo:{name}" for name in (*STEP_METRICS, *COLLECTIVE_METRICS)}


def _record(step: int) -> TrainRecord:
    return TrainRecord(step, 100 * step, 2.5, 0.0, 1.25, 1.0, None, 0.5, 200.0, 0.25, 0.125, 0.25)


def test_prometheus_reads_the_last_step_and_the_sums_of_all_collectives() -> None:
    metrics = TrainMetrics(Path("mine"), "127.0.0.1", 0)
    try:
        for step in (1, 2):
            times = [CollectiveRecord(step, "all_reduce", 4, 1024, 3, 0.5, 2.0, 0.25)]
            metrics.update(_record(step), 1 << 20, times)
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
            text = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/other")
    finally:
        metrics.close()
    found = {
        (sample.name, sample.labels.get("collective", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert {name for name, _ in found} == NAMES
    assert found["cumulo:train_step", ""] == 2 and found["cumulo:train_tokens_total", ""] == 200
    assert found["cumulo:train_data_stall_seconds_total", ""] == 0.25
    assert found["cumulo:train_collective_seconds_total", "all_reduce"] == 1.0
    assert found["cumulo:train_collective_bus_bytes_total", "all_reduce"] == pytest.approx(2e9)


def test_the_training_dashboard_shows_what_a_run_reports() -> None:
    shipped = json.loads((ROOT / "cumulo/serve/monitoring/training.json").read_text())
    shown = [target["expr"] for panel in shipped["panels"] for target in panel.get("targets", [])]
    names = {name for expression in shown for name in re.findall(r"cumulo:\w+", expression)}
    assert names <= NAMES and "cumulo:train_collective_bus_bytes_total" in names


def test_every_metric_of_training_is_in_the_documentation() -> None:
    text = (ROOT / "docs/training.md").read_text()
    assert set(re.findall(r"`(cumulo:train_\w+)`", text)) == NAMES
