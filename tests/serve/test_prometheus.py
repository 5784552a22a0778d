"""A real Prometheus scrapes a real, loaded server; promtool checks the metrics and the alert rules."""

import contextlib
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cumulo.serve.monitoring.__main__ import write
from tests.ports import reserved_port
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model, wait_for
from tests.serve.test_dashboards import shown_expressions

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian, Ubuntu: apt install prometheus)",
)
pytestmark = [needs_prometheus, pytest.mark.long]
# Good queries without an answer: nothing was preempted, and the server has no replicas (test_fleet looks at those),
# no ranks (test_ranked_server) and no adapters (test_adapters).
WITHOUT_ROWS = ("preemptions_by_reason", "replica_", "route_ttft", "rank_", "lora_requests")
ALERTS = Path(__file__).parents[2] / "cumulo/serve/monitoring/alerts.yaml"
ALERTS_TEST = Path(__file__).with_name("alerts_test.yaml")


class RunningPrometheus:
    """On a free port, with the settings that operators get, except for a scrape every second."""

    def __init__(self, target: str, folder: Path) -> None:
        write(folder)
        settings = folder / "prometheus.yml"
        settings.write_text(settings.read_text().replace("127.0.0.1:8000", target).replace("5s", "1s"))
        self._log = (folder / "log").open("wb")
        address = f"127.0.0.1:{reserved_port()}"
        self.url = f"http://{address}"
        self.process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={address}",
                f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn",
            ],
            stdout=self._log,
            stderr=self._log,
        )  # fmt: skip

    def api(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=30).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def query(self, expression: str) -> list[float]:
        return [float(row["value"][1]) for row in self.api("query", query=expression)["result"]]

    def targets(self) -> list[dict[str, Any]]:
        with contextlib.suppress(httpx.TransportError, ValueError):  # it is still starting
            return list(self.api("targets")["activeTargets"])
        return []

    def has_scraped_or_ended(self) -> bool:
        return self.process.poll() is not None or any(target["health"] == "up" for target in self.targets())

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(quick_server: RunningServer) -> Iterator[RunningPrometheus]:
    with tempfile.TemporaryDirectory() as folder:
        running = RunningPrometheus(quick_server.url.removeprefix("http://"), Path(folder) / "prometheus")
        try:
            wait_for(running.has_scraped_or_ended, "a first scrape", quick_server)
            yield running
        finally:
            running.end()


def _bucket_bounds(server: RunningServer, histogram: str) -> list[float]:
    return sorted(
        float(sample.labels["le"])
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == f"{histogram}_bucket"
    )


def _stream(server: RunningServer, number: int) -> tuple[int, float]:
    """Tokens of one streamed answer as the server charged them, and the seconds to its first piece."""
    started_s = time.perf_counter()
    first_s = math.inf
    tokens = 0
    for chunk in server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Count from {number}."}],
        max_tokens=8 + number,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        first_s = min(first_s, time.perf_counter() - started_s)
        tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
    return tokens, first_s


@needs_built_in_model
@pytest.mark.long
def test_prometheus_sees_what_the_clients_saw(server: RunningServer, prometheus: RunningPrometheus) -> None:
    total, first_tokens = "cumulo:generation_tokens_total", "cumulo:time_to_first_token_seconds_count"
    before, served = server.sample(total), server.sample(first_tokens)
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda number: _stream(server, number), range(6)))
    generated = sum(tokens for tokens, _ in answers)
    wait_for(lambda: prometheus.query(total) == [before + generated], "all tokens in Prometheus", server)
    wait_for(lambda: prometheus.query(first_tokens) == [served + 6], "all first tokens in Prometheus", server)
    assert generated >= 6

    # The server's clock for a request starts after the client's and stops before it: no observation can lie above
    # the bucket that holds the slowest client.
    median = "histogram_quantile(0.5, sum by (le) (increase(cumulo:time_to_first_token_seconds_bucket[5m])))"
    (median_s,) = wait_for(lambda: prometheus.query(median), "a quantile", server)
    slowest_s = max(first_s for _, first_s in answers)
    bounds = _bucket_bounds(server, "cumulo:time_to_first_token_seconds")
    assert 0 < median_s <= next(bound for bound in bounds if bound >= slowest_s)

    # On a busy machine a scrape may take longer than its second; the next one comes.
    wait_for(lambda: prometheus.query("up") == [1], "a scrape without an error", server)
    assert prometheus.query("scrape_samples_scraped")[0] > 100


@needs_built_in_model
@pytest.mark.long
def test_every_panel_and_every_rule_works_in_prometheus(
    server: RunningServer, prometheus: RunningPrometheus
) -> None:
    _stream(server, 1)
    chosen = {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}
    for written in shown_expressions():
        query = written
        for variable, value in chosen.items():
            query = query.replace(variable, value)
        if any(name in query for name in WITHOUT_ROWS):
            prometheus.query(query)
        else:  # at the latest when a counter that has just appeared was scraped twice
            wait_for(partial(prometheus.query, query), f"a value of {query}", server)

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]

    wait_for(lambda: all(rule["health"] == "ok" for rule in rules()), "all rules evaluated", server)
    written_rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    names = sorted(rule["alert"] if "alert" in rule else rule["record"] for rule in written_rules)
    assert sorted(rule["name"] for rule in rules()) == names


# -- promtool -----------------------------------------------------------------------------------------------------
def _promtool(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, timeout=120)


@needs_built_in_model
def test_promtool_finds_nothing_wrong_with_the_metrics_but_the_names_we_share_with_vllm(
    server: RunningServer,
) -> None:
    checked = _promtool("check", "metrics", stdin=server.get("/metrics").content)
    assert checked.returncode in (0, 3), checked.stderr  # 3: it can be read, and there are remarks
    remarks = [
        line
        for line in checked.stderr.decode().splitlines()
        if "should not contain ':'" not in line
        and line != 'cumulo:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    ]
    assert remarks == []


def test_the_written_settings_and_rules_are_valid(tmp_path: Path) -> None:
    write(tmp_path)
    for kind, name in (("config", "prometheus.yml"), ("rules", "alerts.yaml")):
        checked = _promtool("check", kind, str(tmp_path / name))
        assert checked.returncode == 0, checked.stderr.decode()


def test_alerts_speak_when_they_should_and_only_then() -> None:
    tested = _promtool("test", "rules", str(ALERTS_TEST))
    assert tested.returncode == 0, tested.stdout.decode() + tested.stderr.decode()


def test_every_alert_has_a_test() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    told = yaml.safe_load(ALERTS_TEST.read_text())["tests"]
    firing = {
        case["alertname"]
        for test in told
        for case in test.get("alert_rule_test", [])
        if case.get("exp_alerts")
    }
    counted = {
        name for test in told for name in alerts if f'"{name}"' in str(test.get("promql_expr_test", ""))
    }
    assert firing | counted == alerts
