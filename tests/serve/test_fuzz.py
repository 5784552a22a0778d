"""schemathesis against a real server: what follows the API's description, or does not, is answered as described.

`schemathesis run URL/openapi.json` is the same for any running server; here a tiny model answers. A second test
makes the fuzzer's bodies go together, so that they reach the engine instead of being refused on the way.
"""

import collections
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import requests
from hypothesis import HealthCheck, Phase

from tests import thorough
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.sensible import sensible
from tests.serve.tiny_model import save_tiny_model

pytestmark = pytest.mark.long

_EVERYDAY = "^/(v1/(chat/completions|embeddings|models)|tokenize|detokenize|health|ready|version)"
PATIENCE_S = 120  # for one answer: more is a hang
SEED = 20
ANSWERED = ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A short context bounds every answer, so no request needs a limit of its own."""
    model = save_tiny_model(tmp_path_factory.mktemp("models"))
    with running_server(str(model), "--no-console", "--max-context", "128") as server:
        yield server


def is_unharmed(server: RunningServer) -> None:
    # The fuzzer hangs up on long streams, so the last of them may still be ending.
    wait_for(
        lambda: (health := server.get("/health").json())["running"] == health["waiting"] == 0,
        "an idle engine",
        server,
    )
    health = server.get("/health").json()
    assert health["status"] == "ok" and health["restarts"] == 0
    wait_for(lambda: server.sample("cumulo:kv_cache_usage_perc") == 0, "free KV blocks", server)
    assert "Traceback" not in server.log


@pytest.mark.long
def test_hundreds_of_cases_find_no_undescribed_answer(fuzzed: RunningServer, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{fuzzed.url}/openapi.json",
        # Boundary values of every field come first, thousands of them; random ones are for long runs.
        "--phases", "coverage,fuzzing", "--max-examples", "85" if thorough.chosen else "3", "--seed", str(SEED),
        "--generation-deterministic", "--request-timeout", str(PATIENCE_S),
        # The other endpoints take four times as long: they are for long runs.
        *([] if thorough.chosen else ["--include-path-regex", _EVERYDAY]),
        # A valid field may still ask for the impossible, which no description can say.
        "--exclude-checks", "positive_data_acceptance",
        "--suppress-health-check", "all", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None and int(generated[1]) >= (2000 if thorough.chosen else 500), done.stdout
    is_unharmed(fuzzed)


@pytest.mark.parametrize(
    ("path", "cases"),
    [
        ("/v1/chat/completions", 30 if thorough.chosen else 8),
        ("/v1/completions", 30 if thorough.chosen else 8),
        pytest.param("/v1/responses", 30, marks=pytest.mark.thorough),
    ],
)
def test_what_goes_together_is_answered(fuzzed: RunningServer, path: str, cases: int) -> None:
    import schemathesis  # a second, which workers that do not come here need not spend
    from schemathesis.specs.openapi import checks

    description = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    statuses: collections.Counter[int] = collections.Counter()
    session = requests.Session()

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=cases, database=None, deadline=None, derandomize=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=description[path]["POST"].as_strategy())
    def ask(case: schemathesis.Case) -> None:
        case.body = sensible(path, case.body)
        # Not case.call: it reads only the beginning of a stream.
        response = session.post(fuzzed.url + path, json=case.body, timeout=PATIENCE_S)
        statuses[response.status_code] += 1
        assert response.status_code in (200, 400), response.text
        case.validate_response(response, checks=[getattr(checks, name) for name in ANSWERED])
        if response.headers["content-type"].startswith("text/event-stream"):
            is_whole(path, response.content.decode())

    ask()
    assert statuses[200] > cases * 0.5, statuses
    is_unharmed(fuzzed)


def is_whole(path: str, stream: str) -> None:
    """No error on the way, and a proper end."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    if path == "/v1/responses":
        assert json.loads(events[-1])["type"] in ("response.completed", "response.incomplete")
    else:
        assert events.pop() == "[DONE]"
    assert all("error" not in json.loads(event) or json.loads(event)["error"] is None for event in events)
