"""A body of 4 MiB, or many at once, slow down nobody: refused in words, with bounded memory, off the event loop."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cumulo.serve.access.keys import new_key
from tests.serve.attack_probe import Figures, Probe
from tests.serve.bodies.attack_bodies import ATTACKS, WITHIN_LIMITS, Attack
from tests.serve.running_server import RunningServer, running_server
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

# Before, one body took half a minute of the event loop and 5 GB. CPU seconds do not grow on a busy machine.
MOST_CPU_BEFORE_HEALTH_S = 5.0
MOST_GROWTH_MIB = 400


class Attacked:
    def __init__(self, server: RunningServer, honest_key: str, key: str) -> None:
        self.server, self.honest_key = server, honest_key
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def send(self, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.server.url + path, content=content, headers=self._headers, timeout=120)

    def refused(self, attack: Attack) -> None:
        answer = self.send(attack.path, attack.body)
        assert answer.status_code == 400, answer.text
        assert attack.told in answer.json()["error"]["message"], answer.text


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("models")
    keys = folder / "keys.json"
    honest_key, key = new_key(keys, "honest"), new_key(keys, "attacker")
    model = save_tiny_model(folder, max_context=2048)
    with running_server(str(model), "--no-console", "--api-keys", str(keys)) as server:
        yield Attacked(server, honest_key, key)


def nobody_noticed(figures: Figures) -> None:
    assert not figures.failures and figures.health_worst_cpu_s < MOST_CPU_BEFORE_HEALTH_S, figures
    assert figures.memory_peak_mib - figures.memory_before_mib < MOST_GROWTH_MIB, figures


@pytest.mark.parametrize(
    "every", [pytest.param(4, id="every fourth"), pytest.param(1, id="all", marks=pytest.mark.long)]
)
def test_every_kind_of_hostile_body_is_refused_while_others_are_served(
    attacked: Attacked, every: int
) -> None:
    def attack() -> None:
        for hostile in (*ATTACKS.values(), *WITHIN_LIMITS.values())[::every]:
            attacked.refused(hostile)

    with Probe(attacked.server, attacked.honest_key, NAME, at_least=10) as probe:
        nobody_noticed(probe.figures(attack))


def test_many_large_bodies_at_once_wait_in_line(attacked: Attacked) -> None:
    hostile = WITHIN_LIMITS["300,000 tokens"]

    def attack() -> None:
        with ThreadPoolExecutor(24) as threads:
            answers = list(threads.map(lambda _: attacked.send(hostile.path, hostile.body), range(24)))
        assert {answer.status_code for answer in answers} <= {400, 503}, {a.status_code for a in answers}
        assert all("Retry-After" in answer.headers for answer in answers if answer.status_code == 503)
        assert any(answer.status_code == 400 for answer in answers)

    with Probe(attacked.server, attacked.honest_key, NAME, at_least=5) as probe:
        nobody_noticed(probe.figures(attack))


def test_a_long_prompt_of_tokens_or_text_is_answered(attacked: Attacked) -> None:
    tokens = {"model": NAME, "prompt": [5] * 2000, "max_tokens": 2}
    assert attacked.send("/v1/completions", tokens).json()["usage"]["prompt_tokens"] == 2000
    # More than 64 KiB, so these are read in the thread: fields of an embedding, a chat in plain and in full form.
    many = {"model": NAME, "input": [[7] * 1000] * 40, "encoding_format": "base64"}
    assert len(attacked.send("/v1/embeddings", many).json()["data"]) == 40
    for more in ({}, {"metadata": {"a": "b"}}):
        chat = {"model": NAME, "messages": [{"role": "user", "content": ", " * 40_000}], **more}
        answer = attacked.send("/v1/chat/completions", chat)
        assert answer.status_code == 400 and "shorten the prompt" in answer.text


def test_texts_that_are_too_long_say_so_by_code_and_can_be_counted(attacked: Attacked) -> None:
    content = "\u4e2d" * 1500 + " and on" * 900
    counted = attacked.send("/tokenize", {"model": NAME, "prompt": content}).json()["count"]
    assert 2048 < counted < 4 * 2048
    chat = {"model": NAME, "messages": [{"role": "user", "content": content}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"model": NAME, "prompt": content}),
        ("/v1/embeddings", {"model": NAME, "input": content}),
        ("/tokenize", {"model": NAME, "prompt": 4 * content}),
    ):
        answer = attacked.send(path, body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text


def test_a_large_body_with_a_mistake_is_told_as_a_small_one(attacked: Attacked) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_token": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "frobnicate": 1}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", {"prompt": [1.5]}),
        ("/v1/completions", {}),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}),
        ("/tokenize", {"prompt": 5}),
    ):
        body: dict[str, Any] = {"model": NAME, **fields}
        small, large = (
            attacked.send(path, body),
            attacked.send(path, b" " * 70_000 + json.dumps(body).encode()),
        )
        assert small.status_code == large.status_code == 400
        assert small.json() == large.json()


def test_a_large_body_that_is_no_json_is_400(attacked: Attacked) -> None:
    for body in (b"{" + b" " * 70_000, b'{"a": "' + b"x" * 70_000, b"[" * 9_000 + b" " * 70_000):
        answer = attacked.send("/v1/chat/completions", body)
        assert answer.status_code == 400 and "body" in answer.json()["error"]["message"]


def test_too_many_log_probabilities_are_refused_by_name(attacked: Attacked) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    for path, body in (
        ("/v1/chat/completions", chat | {"n": 128, "top_logprobs": 20, "max_tokens": 500}),
        ("/v1/chat/completions", chat | {"n": 128, "top_logprobs": 20, "max_tokens": 500, "stream": True}),
        ("/v1/completions", {"model": NAME, "prompt": ["Hi"] * 128, "logprobs": 20, "max_tokens": 100}),
        ("/v1/completions", {"model": NAME, "prompt": [5] * 1000, "logprobs": 5, "echo": True, "n": 64}),
    ):
        answer = attacked.send(path, body)
        assert answer.status_code == 400, answer.text[:300]
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("too_many_logprobs", "logprobs")
        assert "262,144" in error["message"]


def test_many_log_probabilities_are_answered(attacked: Attacked) -> None:
    body = {
        "model": NAME, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20,
        "n": 8, "max_tokens": 60, "ignore_eos": True, "seed": 1,
    }  # fmt: skip
    choices = attacked.send("/v1/chat/completions", body).json()["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [60] * 8
    assert all(len(entry["top_logprobs"]) == 20 for c in choices for entry in c["logprobs"]["content"])
    text = {"model": NAME, "prompt": [5] * 300, "logprobs": 20, "echo": True, "max_tokens": 2}
    columns = attacked.send("/v1/completions", text).json()["choices"][0]["logprobs"]
    assert len(columns["tokens"]) in (301, 302)
