"""Several models in one server: loaded on request, unloaded for others, and no request that suffers from it."""

import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.running_server import (
    MODEL,
    RunningServer,
    needs_built_in_model,
    quick_model,
    running_server,
    wait_for,
)

pytestmark = [needs_built_in_model, pytest.mark.long]

# One of the two fits: each has its weights, 64 MiB of KV cache, and what a step needs.
BUDGET = ("--kv-memory-gib", "0.0625", "--max-running", "8", "--max-tokens-per-step", "256")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        shutil.copy(quick_model(), found / f"{name}.gguf")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    options = ("--models", f"two={folder / 'two.gguf'}", "--models-memory-gib", "0.13", "--models-idle", "0")
    with running_server(str(folder / "one.gguf"), *BUDGET, *options, "--no-console") as running:
        yield running


def chat(server: RunningServer, model: str, **more: object) -> dict:  # type: ignore[type-arg]
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model.removesuffix(":latest")
    return answer.json()  # type: ignore[no-any-return]


def states(server: RunningServer) -> dict[str, float]:
    return {name: server.sample("cumulo:engine_up", model_name=name) for name in ("one", "two")}


def engines(server: RunningServer) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if parent == server.process.pid and b"engine_process" in command:
            found.add(int(entry.name))
    return found


def test_all_models_are_listed_and_answer_by_name(server: RunningServer) -> None:
    listed = server.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["one", "two"]
    chat(server, "one")
    chat(server, "two")
    assert chat(server, "two:latest")["usage"]["completion_tokens"] == 4
    assert server.get("/v1/models/two").json()["state"] == "loaded"
    assert server.get("/v1/models/two").json()["max_model_len"] > 0


def test_an_unknown_model_is_refused_with_the_names_of_all(server: RunningServer) -> None:
    answer = server.post(
        "/v1/chat/completions", {"model": "three", "messages": [{"role": "user", "content": "a"}]}
    )
    assert answer.status_code == 404
    assert "this server has one, two" in answer.json()["error"]["message"]


def test_an_unload_never_ends_a_running_answer(server: RunningServer) -> None:
    """The long answer runs when the other model is asked for; it is complete, and only then the other begins."""
    chat(server, "one")
    begun = threading.Event()
    order: list[str] = []

    def long_answer() -> int:
        body = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        text = ""
        with server.client()._client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                begun.set()
                text += line
        order.append("one")
        return int(re.search(r'"completion_tokens":(\d+)', text)[1])  # type: ignore[index]

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(long_answer)
        assert begun.wait(300)
        chat(server, "two")
        order.append("two")
        assert running.result() == 400
    assert order == ["one", "two"]


def test_two_models_are_switched_ten_times_without_a_leak_or_a_lost_request(server: RunningServer) -> None:
    def open_files() -> int:
        return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))

    chat(server, "one")
    chat(server, "two")
    chat(server, "one")
    wait_for(lambda: len(engines(server)) == 1, "one engine", server)
    files = open_files()
    seen = engines(server)
    for _ in range(5):
        with ThreadPoolExecutor(6) as pool:  # both at once: requests of both wait for each other's end
            answers = list(pool.map(lambda number: chat(server, ("two", "one")[number % 2]), range(6)))
        assert len(answers) == 6
        assert len(engines(server)) <= 1
        seen |= engines(server)
    switched = len(re.findall(r"(one|two) is loaded, in", server.log))
    assert switched >= 10, server.log
    wait_for(lambda: len(engines(server)) == 1, "one engine", server)
    wait_for(lambda: open_files() <= files + 4, "files to be closed", server)
    assert sum(states(server).values()) <= 2
    assert server.get("/health").status_code == 200
    assert server.get("/ready").status_code == 200
    # What is known of requests is shared: each model's stories are found, and all requests were counted.
    assert server.sample("cumulo:request_success_total", model_name="two") >= 15
    assert server.sample("cumulo:request_success_total", model_name="one") >= 15


def test_a_model_that_exceeds_the_budget_is_refused_in_words(folder: Path) -> None:
    options = ("--models", "built-in", "--models-memory-gib", "0.13", "--no-console")
    with running_server(str(folder / "one.gguf"), *BUDGET, *options) as running:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        answer = running.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert "cannot be loaded: this configuration needs" in answer.json()["error"]["message"]
        chat(running, "one")


def test_an_idle_model_is_unloaded_and_comes_back(folder: Path) -> None:
    options = ("--models", str(folder / "two.gguf"), "--models-idle", "0.2", "--no-console")
    with running_server(str(folder / "one.gguf"), *BUDGET, *options) as running:
        wait_for(lambda: not engines(running), "the unload", running)
        assert running.get("/ready").status_code == 200
        chat(running, "one")
        wait_for(lambda: not engines(running), "the second unload", running)
        chat(running, "two")
