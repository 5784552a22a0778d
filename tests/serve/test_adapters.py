"""Adapters of a server with two replicas: listed and asked as models, loaded and dropped under load, and loaded
again by an engine that was killed. Real processes."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cumulo.errors import CumuloError
from cumulo.models.files.load import inspect_model
from cumulo.serve.access.keys import new_key
from cumulo.serve.adapter_registry import AdapterRefused, AdapterRegistry, named_loras, split_lora
from tests.models.adapter_files import write_adapter
from tests.serve.running_server import RunningServer, events_of, running_server, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model
from tests.whole_command import app

pytestmark = pytest.mark.long
ASKED: dict[str, Any] = {"prompt": "Once upon a time the cat", "max_tokens": 12, "temperature": 0}


class AdapterServer:
    def __init__(self, server: RunningServer, folders: dict[str, Path], key: str, operator: str) -> None:
        self.server, self.folders, self.key, self.operator = server, folders, key, operator
        server.operator_key = operator
        wait_for(self.all_ready, "all replicas", server)

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        if method == "GET":
            return self.server.get(path, headers=headers)
        return self.server.post(path, body, headers=headers)

    def operate(self, path: str, **body: str) -> httpx.Response:
        return self.ask("POST", path, body, self.operator)

    def load(self, name: str, folder: str) -> httpx.Response:
        return self.operate("/v1/load_lora_adapter", lora_name=name, lora_path=str(self.folders[folder]))

    def drop(self, name: str) -> httpx.Response:
        return self.operate("/v1/unload_lora_adapter", lora_name=name)

    def answer(self, model: str) -> httpx.Response:
        return self.ask("POST", "/v1/completions", ASKED | {"model": model})

    def text(self, model: str) -> str:
        answer = self.answer(model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return str(answer.json()["choices"][0]["text"])

    def pids(self) -> dict[str, int]:
        replicas = self.ask("GET", "/v1/fleet", key=self.operator).json()["replicas"]
        return {one["name"]: one["pid"] for one in replicas if one["state"] == "ready"}

    def all_ready(self) -> bool:
        return len(self.pids()) == 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServer]:
    folder = tmp_path_factory.mktemp("adapters")
    model = save_tiny_model(folder)
    spec = inspect_model(model).spec
    folders = {
        name: write_adapter(folder / name, spec, rank=rank, seed=rank, strength=2.0)
        for name, rank in (("poet", 4), ("pirate", 9), ("monk", 20))
    }
    keys = folder / "keys.json"
    key, operator = new_key(keys, "ann"), new_key(keys, "ops", may_operate=True)
    options = ("--replicas", "2", "--kv-memory-gib", "0.02", "--api-keys", str(keys), "--no-console")
    loras = ("--lora", f"poet={folders['poet']}", "--max-loras", "3")
    with running_server(str(model), *options, *loras) as running:
        yield AdapterServer(running, folders, key, operator)


def test_adapters_are_models_with_a_parent(served: AdapterServer) -> None:
    listed = served.ask("GET", "/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [(NAME, None), ("poet", NAME)]
    assert listed[1]["root"] == str(served.folders["poet"])
    assert served.ask("GET", "/v1/models/poet").json()["parent"] == NAME
    assert served.text("poet") != served.text(NAME)


def test_every_endpoint_answers_with_the_adapter_it_is_asked_for(served: AdapterServer) -> None:
    message = [{"role": "user", "content": "hello"}]
    said = {}
    for model in (NAME, "poet"):
        chat = served.ask("POST", "/v1/chat/completions", {"model": model, "messages": message, "max_tokens": 8,
                          "temperature": 0}).json()  # fmt: skip
        vector = served.ask("POST", "/v1/embeddings", {"model": model, "input": "hello"}).json()
        response = served.ask("POST", "/v1/responses", {"model": model, "input": "hello", "max_output_tokens": 8,
                              "temperature": 0, "store": False}).json()  # fmt: skip
        anthropic = served.ask("POST", "/v1/messages", {"model": model, "messages": message, "max_tokens": 8,
                               "temperature": 0}).json()  # fmt: skip
        answers = (chat, vector, response, anthropic)
        assert {answer["model"] for answer in answers} == {model}
        said[model] = (chat["choices"][0]["message"]["content"], vector["data"][0]["embedding"],
                       response["output"], anthropic["content"])  # fmt: skip
    for plain, adapted in zip(*said.values(), strict=True):
        assert plain != adapted


def test_the_story_of_a_request_names_its_adapter(served: AdapterServer) -> None:
    answer = served.answer("poet").json()
    story = served.ask("GET", f"/v1/requests/{answer['id']}/explain").json()["data"][0]
    assert story["model"] == "poet"
    assert "answered with the adapter poet, of rank 4" in str(story["events"])
    assert served.server.sample("cumulo:lora_requests_total", adapter="poet") >= 1
    assert served.server.sample("cumulo:lora_adapters") == 1
    stranger = served.server.get("/metrics").text
    assert 'adapter="poet"' not in stranger


def test_a_name_that_nobody_has_is_refused_with_the_nearest(served: AdapterServer) -> None:
    refused = served.answer("peot")
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert "did you mean 'poet'?" in refused.json()["error"]["message"]


def test_only_operators_load_and_drop(served: AdapterServer) -> None:
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/"}),
        ("/v1/unload_lora_adapter", {"lora_name": "poet"}),
    ):
        refused = served.ask("POST", path, body)
        assert refused.status_code == 403 and "--operator" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"lora_name": "poet", "lora_path": "/tmp"}, "loaded already"),
        ({"lora_name": NAME, "lora_path": "/tmp"}, "the model itself"),
        ({"lora_name": "a b", "lora_path": "/tmp"}, "letters, digits"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "no folder /nowhere"),
        ({"lora_name": "x", "lora_path": "/tmp"}, "adapter_config.json"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_refused_and_leaves_nothing(served, body, words) -> None:
    refused = served.operate("/v1/load_lora_adapter", **body)
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert [one["id"] for one in served.ask("GET", "/v1/models").json()["data"]] == [NAME, "poet"]


def test_a_rank_too_high_is_refused_with_the_option_that_allows_it(served: AdapterServer) -> None:
    refused = served.load("monk", "monk")
    assert refused.status_code == 400 and "--max-lora-rank 20" in refused.json()["error"]["message"]


def test_adapters_come_and_go_under_load_without_a_failed_request(served: AdapterServer) -> None:
    """Four clients ask all the time; a name is loaded, dropped and loaded with other weights between them. It is
    answered with the weights of one of its loads, or not known; everything else is answered as ever."""
    expected = {name: served.text(name) for name in (NAME, "poet")}
    weights = ("pirate", "poet")
    texts = set()
    for folder in weights:
        assert served.load("turn", folder).status_code == 200
        texts.add(served.text("turn"))
        assert served.drop("turn").json()["state"] == "dropped"
    over, counts = Event(), {"turn": 0, "unknown": 0, "others": 0}

    def keep_asking(models: tuple[str, ...]) -> None:
        turn = 0
        while not over.is_set():
            model = models[turn % len(models)]
            turn += 1
            answer = served.answer(model)
            if model != "turn":
                assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected[model]
                counts["others"] += 1
            elif answer.status_code == 404:
                assert answer.json()["error"]["code"] == "model_not_found"
                counts["unknown"] += 1
            else:
                assert answer.status_code == 200 and answer.json()["choices"][0]["text"] in texts
                counts["turn"] += 1

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(keep_asking, (NAME, "turn", "poet")) for _ in range(4)]
        try:
            for number in range(4):
                assert served.load("turn", weights[number % 2]).status_code == 200
                before = counts["turn"]
                wait_for(
                    lambda before=before: counts["turn"] > before or any(c.done() for c in clients), "answers"
                )
                dropped = served.drop("turn")
                assert dropped.status_code == 200 and dropped.json()["state"] in ("dropped", "leaving")
                wait_for(lambda: served.answer("turn").status_code == 404, "its end")
        finally:
            over.set()
        for client in clients:
            client.result()
    assert counts["turn"] >= 4 and counts["others"] >= 4


def test_a_stream_outlives_the_drop_of_its_adapter_and_the_place_is_free_after_it(
    served: AdapterServer,
) -> None:
    asked = ASKED | {"model": "turn", "max_tokens": 200, "ignore_eos": True}
    assert served.load("turn", "pirate").status_code == 200
    expected = served.ask("POST", "/v1/completions", asked).json()["choices"][0]["text"]
    headers = {"Authorization": f"Bearer {served.key}"}
    url = f"{served.server.url}/v1/completions"
    with httpx.stream("POST", url, json=asked | {"stream": True}, headers=headers, timeout=60) as stream:
        events = events_of(stream)
        told = [next(events)]
        dropped = served.drop("turn").json()
        assert served.answer("turn").status_code == 404
        told += events
    text = "".join(choice["text"] for event in told for choice in event["choices"])
    assert text == expected
    assert dropped["state"] in ("leaving", "dropped")
    # All three places can be taken: nothing of it is left.
    wait_for(lambda: served.load("one", "pirate").status_code == 200, "a place")
    wait_for(lambda: served.load("two", "pirate").status_code == 200, "a place")
    full = served.load("three", "pirate")
    assert full.status_code == 400 and "all 3 places" in full.json()["error"]["message"]
    for name in ("one", "two"):
        served.drop(name)


def test_a_killed_engine_comes_back_with_its_adapters(served: AdapterServer) -> None:
    assert served.load("turn", "pirate").status_code == 200
    expected = {name: served.text(name) for name in (NAME, "poet", "turn")}
    before = served.pids()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)

    def both_are_new() -> bool:
        now = set(served.pids().values())  # asked once: in between the dead ones might go
        return len(now) == 2 and not now & set(before.values())

    wait_for(both_are_new, "new engines")
    for _ in range(4):  # on both of them
        assert {name: served.text(name) for name in expected} == expected
    assert served.drop("turn").status_code == 200


# -- the registry ------------------------------------------------------------------------------------------------
def test_a_name_that_is_loaded_anew_is_another_adapter_for_the_engines() -> None:
    registry, freed = AdapterRegistry(2, "base"), []
    registry.on_free = freed.append
    first = registry.put("x", "/a")
    assert registry.named("x") is None  # not before the engines have it
    first.ready, first.fingerprint = True, "f"
    registry.hold(first)
    registry.drop("x")
    assert registry.named("x") is None and not freed and first.key in registry.all
    second = registry.put("x", "/b")
    assert second.key != first.key
    with pytest.raises(AdapterRefused, match="x waits for its last request"):
        registry.put("y", "/c")
    registry.release(first)
    assert freed == [first] and set(registry.all) == {second.key}
    assert registry.salted("s", first.key) == "s" and registry.salted("s", second.key) == "s"


def test_an_adapter_that_a_restarted_engine_lost_can_be_loaded_again_or_dropped() -> None:
    registry = AdapterRegistry(1, "base")
    lost = registry.put("x", "/a")
    lost.ready, lost.error = False, "the folder is gone"
    assert registry.named("x") is None
    again = registry.put("x", "/a")
    assert set(registry.all) == {again.key}
    again.error = "gone again"
    registry.drop("x")
    assert not registry.all


def test_an_adapter_is_named_by_its_folder_where_it_has_no_name() -> None:
    assert split_lora("poet=/runs/a") == ("poet", "/runs/a")
    assert split_lora("/runs/adapter") == ("adapter", "/runs/adapter")
    with pytest.raises(CumuloError, match="NAME=DIR"):
        split_lora("=x")


def test_a_name_that_is_given_twice_is_refused() -> None:
    assert named_loras(["a=/x", "/runs/b"]) == {"a": "/x", "b": "/runs/b"}
    with pytest.raises(CumuloError, match="--lora names 'a' twice, for /x and /y: choose another name"):
        named_loras(["a=/x", "a=/y"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora", "a={}", "--lora", "a={}"], "--lora names 'a' twice"),
        (["--lora", "a={}", "--max-loras", "0"], "--max-loras 0 leaves no place"),
        (["--lora", "a={}", "--max-lora-rank", "16"], "--max-lora-rank 16 is less than the rank of a, 64"),
    ],
)
def test_limits_that_were_asked_for_hold_before_a_model_is_loaded(
    options: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 64, "lora_alpha": 8}')
    found = CliRunner().invoke(app, ["serve", *(word.format(tmp_path) for word in options)])
    assert isinstance(found.exception, CumuloError) and said in str(found.exception), found.exception
