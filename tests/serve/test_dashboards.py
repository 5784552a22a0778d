"""The Grafana dashboards and the alert rules are about metrics that exist."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from cumulo.serve import monitoring
from cumulo.serve.observe.fleet_metrics import rank_metrics, replica_metrics
from cumulo.serve.observe.metrics import Metrics

FOLDER = Path(monitoring.__file__).parent
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
GROUPS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]


def exported() -> set[str]:
    """Every series name that /metrics can have."""
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    metrics = Metrics("m")
    replica_metrics(metrics.registry, "m", list)
    rank_metrics(metrics.registry, "m", dict)
    return {
        family.name + suffix
        for family in text_string_to_metric_families(metrics.text().decode())
        for suffix in suffixes[family.type]
    }


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"(?<![\w:])cumulo:\w+", expression))


def shown_expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_every_metric_on_the_dashboard_and_in_the_alerts_exists() -> None:
    known = exported()
    rules = [rule["expr"] for group in GROUPS for rule in group["rules"]]
    for expression in shown_expressions() + rules:
        names = names_in(expression)
        assert names <= known, expression
        assert names or "up{" in expression or "cumulo_first_token_late" in expression


def test_every_metric_is_in_the_documentation_and_nothing_else() -> None:
    text = (FOLDER.parents[2] / "docs/observability.md").read_text()
    listed = names_in(text.partition("## The metrics")[2])
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    assert listed == {name for name in families if not name.endswith("_created")}


def test_every_alert_is_in_the_documentation() -> None:
    text = (FOLDER.parents[2] / "docs/observability.md").read_text()
    alerts = {rule["alert"] for group in GROUPS for rule in group["rules"] if "alert" in rule}
    assert set(re.findall(r"`(Cumulo\w+)`", text)) == alerts


def test_rules_record_what_other_rules_use() -> None:
    text = (FOLDER / "alerts.yaml").read_text()
    recorded = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
    assert set(re.findall(r"instance:cumulo_\w+:\w+", text)) == recorded


def test_the_dashboard_shows_what_an_operator_needs() -> None:
    shown = set().union(*map(names_in, shown_expressions()))
    wanted = {
        "num_requests_running", "num_requests_waiting", "generation_tokens_total", "prompt_tokens_total",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "kv_cache_usage_perc",
        "prefix_cache_hits_total", "preemptions_by_reason_total", "recomputed_tokens_total", "wait_seconds_total",
        "fairness_index", "tenant_tokens_total",
        "ledger_predicted_over_measured", "http_responses_total", "engine_restarts", "engine_up",
        "replica_up", "replica_running", "replica_waiting", "replica_requests_total", "requests_moved_total",
    }  # fmt: skip
    assert {f"cumulo:{name}" for name in wanted} <= shown


def test_every_panel_has_a_place_a_number_and_a_data_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["description"] and panel["targets"]
            letters = [target["refId"] for target in panel["targets"]]
            assert len(letters) == len(set(letters))
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers)) and 0 not in numbers
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == [
        "datasource", "model", "instance",
    ]  # fmt: skip
