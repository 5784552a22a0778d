"""`cumulo serve --autoscale`: replicas come and go with the load, down to none and back, and no request is lost."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from cumulo.errors import CumuloError
from cumulo.serve.options import ServeOptions
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long
ASKED: dict[str, Any] = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True}
# A replica that counts as slow, so that a few requests per second are a load for three.
RULE = "0..3,interval=200ms,idle=1s,cooldown=1s,start-up=1s,prompt-tok-s=10,output-tok-s=10,ttft=60s"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = save_tiny_model(tmp_path_factory.mktemp("tiny") / NAME)
    options = ("--no-console", "--replicas", "1", "--autoscale", RULE)
    with running_server(str(model), *options) as started:
        yield started


def fleet(server: RunningServer) -> dict[str, Any]:
    answer: dict[str, Any] = server.get("/v1/fleet").json()
    return answer


def ready(server: RunningServer) -> int:
    return sum(one["state"] == "ready" for one in fleet(server)["replicas"])


def test_replicas_follow_the_load_to_three_to_none_and_back_without_a_lost_request(
    server: RunningServer,
) -> None:
    enough = Event()

    def ask_until_enough() -> list[int]:
        statuses = []
        while not enough.is_set():
            answer = server.post("/v1/completions", ASKED)
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == ASKED["max_tokens"]
        return statuses

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_until_enough) for _ in range(4)]
        try:
            wait_for(lambda: ready(server) == 3, "three replicas", server)
        finally:
            enough.set()
        assert {status for one in asking for status in one.result()} == {200}
    wait_for(lambda: not fleet(server)["replicas"], "no replica", server)
    assert server.status("/ready") == 200  # requests are taken: they wait for a replica
    answer = server.post("/v1/completions", ASKED)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == ASKED["max_tokens"]
    report = fleet(server)["autoscale"]
    sizes = [one["after"] for one in report["events"]]
    assert 3 in sizes
    assert 0 in sizes[sizes.index(3) :]
    assert sizes[-1] >= 1 or sizes.count(0) > 1
    assert report["slo_attainment"] == 1.0
    assert all(one["why"] for one in report["events"])


@pytest.mark.thorough
def test_prefill_engines_follow_prompts_and_replicas_follow_answers(tmp_path: Path) -> None:
    # Prompts count as slow and answers as fast: a few requests per second are a load for two prefill engines.
    rule = "1..2,prefill=1..2,interval=200ms,cooldown=1s,start-up=1s,prompt-tok-s=20,output-tok-s=100000,ttft=60s"
    model = save_tiny_model(tmp_path / NAME)
    options = ("--no-console", "--decode", "1", "--prefill", "1", "--autoscale", rule)
    with running_server(str(model), *options) as server:
        enough = Event()

        def ask_until_enough() -> set[int]:
            statuses = set()
            while not enough.is_set():
                statuses.add(server.post("/v1/completions", ASKED).status_code)
            return statuses

        def prefills() -> list[str]:
            return [one["state"] for one in fleet(server)["prefill_engines"]]

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(ask_until_enough) for _ in range(2)]
            try:
                wait_for(lambda: prefills() == ["ready", "ready"], "two prefill engines", server)
            finally:
                enough.set()
            assert set.union(*(one.result() for one in asking)) == {200}
        wait_for(lambda: len(prefills()) == 1, "one prefill engine again", server)
        assert server.post("/v1/completions", ASKED).status_code == 200
        report = fleet(server)["autoscale"]
        assert report["prefill"]["max"] == 2
        assert {one["role"] for one in report["events"]} == {"prefill"}
        assert ready(server) == 1


@pytest.mark.parametrize(
    ("autoscale", "words"),
    [
        ("3", "a range such as 1..4"),
        ("2..4", "must be within autoscale 2..4"),
        ("1..4,idel=5s", "did you mean idle?"),
        ("1..4,idle=soon", "a time such as"),
        ("0..0", "max of 1 or more"),
        ("1..4,prefill=2", "prefill must be a range such as 1..4"),
        ("1..4,prefill=1..2", "prefill=0 must be 1 or more"),
        ("1..4,devices=many", "devices must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(autoscale: str, words: str) -> None:
    with pytest.raises(CumuloError, match=words):
        ServeOptions(autoscale=autoscale)


def test_a_size_within_the_range_is_taken() -> None:
    assert ServeOptions(autoscale="0..4,ttft=1s,tpot=50ms").autoscale
