"""/v1/embeddings, asked by the official client; `transformers` with the same weights is the oracle."""

import asyncio
import base64
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from cumulo.engine.decide.params import Pooling
from cumulo.serve.access.keys import new_key
from tests import peers
from tests.engine.pooled_reference import reference_embedding
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

CONTEXT = 512
TEXTS = ["the cat sat on the mat", "def add(first, second):", "naïve café, seen in 3 of 10 cases — 😀"]
CAT: dict[str, Any] = {"model": NAME, "input": TEXTS[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("embeddings"), CONTEXT)


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    path = folder.parent / "keys.json"
    return {"ann": new_key(path, "ann"), "bob": new_key(path, "bob", tokens_per_minute=40)}


@pytest.fixture(scope="module")
def embedder(folder: Path, keys: dict[str, str]) -> Iterator[RunningServer]:
    # The queue holds fewer than a call of many inputs has: they must follow each other.
    with running_server(
        str(folder), "--api-keys", str(folder.parent / "keys.json"), "--max-running", "8", "--max-queue", "80"
    ) as running:
        yield running


@pytest.fixture
def ann(embedder: RunningServer, keys: dict[str, str]) -> openai.OpenAI:
    return embedder.client(keys["ann"])


class Oracle:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = peers.transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
        self.model = peers.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text)
        return tokens

    def embedding(self, text: str, pooling: Pooling = "mean") -> Any:
        return reference_embedding(self.model, self.tokens(text), pooling)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def post(server: RunningServer, keys: dict[str, str], body: Any) -> httpx.Response:
    return server.post("/v1/embeddings", body, headers={"Authorization": f"Bearer {keys['ann']}"})


def as_array(answer: Any) -> Any:
    return np.array([item.embedding for item in answer.data])


# -- what it answers ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("encoding", ["float", "base64", None])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_transformers(
    ann: openai.OpenAI, oracle: Oracle, encoding: Any, pooling: Pooling
) -> None:
    more = {} if encoding is None else {"encoding_format": encoding}
    answer = ann.embeddings.create(model=NAME, input=TEXTS, user="u", extra_body={"pooling": pooling}, **more)
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.model == NAME
    assert {item.object for item in answer.data} == {"embedding"} and answer.object == "list"
    if encoding == "base64":  # the client decodes only what it asked for itself
        got = np.array([np.frombuffer(base64.b64decode(str(d.embedding)), "<f4") for d in answer.data])
    else:
        got = as_array(answer)
    np.testing.assert_allclose(got, [oracle.embedding(text, pooling) for text in TEXTS], atol=2e-4)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
    tokens = sum(len(oracle.tokens(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_every_form_of_input_gives_the_same_and_mean_is_the_default(
    ann: openai.OpenAI, oracle: Oracle
) -> None:
    tokens = oracle.tokens(TEXTS[0])
    forms: list[Any] = [TEXTS[0], [TEXTS[0]], tokens, [tokens]]
    for form in forms:
        answer = ann.embeddings.create(model=NAME, input=form)
        np.testing.assert_allclose(as_array(answer), [oracle.embedding(TEXTS[0])], atol=2e-4)


def test_the_asynchronous_client_embeds(
    embedder: RunningServer, keys: dict[str, str], oracle: Oracle
) -> None:
    async def ask() -> Any:
        url = f"{embedder.url}/v1"
        async with openai.AsyncOpenAI(
            base_url=url, api_key=keys["ann"], max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(client.embeddings.create(model=NAME, input=text) for text in TEXTS))

    for text, answer in zip(TEXTS, asyncio.run(ask()), strict=True):
        np.testing.assert_allclose(as_array(answer)[0], oracle.embedding(text), atol=2e-4)


def test_fewer_dimensions_are_the_first_ones_at_length_one(ann: openai.OpenAI, oracle: Oracle) -> None:
    got = as_array(ann.embeddings.create(**CAT, dimensions=7))[0]
    first = oracle.embedding(TEXTS[0])[:7]
    np.testing.assert_allclose(got, first / np.linalg.norm(first), atol=5e-4)
    assert len(as_array(ann.embeddings.create(**CAT, dimensions=48))[0]) == 48


def test_hundreds_of_inputs_come_back_in_order(ann: openai.OpenAI, oracle: Oracle) -> None:
    """More than running and waiting requests may be at once."""
    texts = [f"the {number} cats" for number in range(300)]
    got = as_array(ann.embeddings.create(model=NAME, input=texts))
    assert len(got) == 300
    for index in (0, 63, 64, 150, 299):
        np.testing.assert_allclose(got[index], oracle.embedding(texts[index]), atol=2e-4)


# -- what it refuses ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"dimensions": 49}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "7"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "median"}, "pooling"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["x", 1]}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": 7}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"user": 3}, "user"),
        ({"stream": True}, "stream"),
        ({"temperature": 1}, "temperature"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:30],
)
def test_a_wrong_field_is_named(
    embedder: RunningServer, keys: dict[str, str], change: Any, param: str
) -> None:
    answer = post(embedder, keys, CAT | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"].startswith(param)


def test_a_text_may_fill_the_context_and_no_more(embedder: RunningServer, keys: dict[str, str]) -> None:
    assert post(embedder, keys, CAT | {"input": [5] * CONTEXT}).status_code == 200
    answer = post(embedder, keys, CAT | {"input": [[5], [5] * (CONTEXT + 1)]})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert f"{CONTEXT + 1} tokens" in answer.json()["error"]["message"]
    assert post(embedder, keys, CAT | {"input": "word " * 100_000}).status_code == 400
    foreign = post(embedder, keys, CAT | {"input": [5, 100_000]})
    assert foreign.status_code == 400 and "token 100000" in foreign.json()["error"]["message"]


def test_other_models_and_strangers_are_refused(embedder: RunningServer, keys: dict[str, str]) -> None:
    assert post(embedder, keys, CAT | {"model": "text-embedding-3-small"}).status_code == 404
    assert embedder.post("/v1/embeddings", CAT).status_code == 401


def test_inputs_count_against_the_tokens_per_minute(embedder: RunningServer, keys: dict[str, str]) -> None:
    bob = embedder.client(keys["bob"])
    bob.embeddings.create(model=NAME, input=[5] * 39)
    with pytest.raises(openai.RateLimitError) as caught:
        bob.embeddings.create(model=NAME, input=[5] * 39)
    assert (
        caught.value.code == "rate_limit_exceeded" and int(caught.value.response.headers["Retry-After"]) >= 1
    )


# -- how it runs --------------------------------------------------------------------------------------------------
def test_an_embedding_has_a_story_a_trace_and_its_place_in_the_metrics(
    embedder: RunningServer, keys: dict[str, str]
) -> None:
    key = {"Authorization": f"Bearer {keys['ann']}"}
    names = ("cumulo:prompt_tokens_total", "cumulo:generation_tokens_total", "cumulo:request_success_total")
    before = [embedder.sample(name) for name in names]
    body = CAT | {"input": [[7] * 40, [8] * 3], "cache_salt": "story"}
    answer = post(embedder, keys, body)
    assert [embedder.sample(name) - was for name, was in zip(names, before, strict=True)] == [43, 0, 2]
    assert answer.headers["x-request-id"] == answer.json()["id"]
    asked = embedder.get(f"/v1/requests/{answer.json()['id']}/explain", headers=key).json()["data"]
    assert [story["tokens"]["prompt"] for story in asked] == [40, 3]
    for story in asked:
        assert "ended with its embedding" in story["summary"]
        assert {"embed", "admitted", "chunk", "embedded"} <= {event["kind"] for event in story["events"]}
    trace = embedder.get(f"/v1/requests/{answer.json()['id']}/explain?format=trace", headers=key).json()
    assert {"queued", "prefill"} <= {event["name"] for event in trace["traceEvents"]}
    cached = [
        post(embedder, keys, body | {"pooling": pooling}).json()["usage"]["prompt_tokens_details"]
        for pooling in ("mean", "last")
    ]
    assert cached == [{"cached_tokens": 0}, {"cached_tokens": 32}]


def test_a_client_that_hangs_up_ends_its_embeddings(embedder: RunningServer, keys: dict[str, str]) -> None:
    body = json.dumps(CAT | {"input": [[5 + number % 50] * CONTEXT for number in range(600)]}).encode()
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {keys['ann']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    done = embedder.sample("cumulo:request_success_total", finished_reason="stop")
    with socket.create_connection(("127.0.0.1", int(embedder.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: embedder.sample("cumulo:num_requests_running") > 0, "its beginning", embedder)
    wait_for(
        lambda: (
            embedder.sample("cumulo:num_requests_running") + embedder.sample("cumulo:num_requests_waiting")
            == 0
        ),
        "its end",
        embedder,
    )
    wait_for(lambda: embedder.sample("cumulo:kv_cache_usage_perc") == 0, "free blocks", embedder)
    assert embedder.sample("cumulo:request_success_total", finished_reason="abort") > 0
    assert embedder.sample("cumulo:request_success_total", finished_reason="stop") - done < 600


@pytest.mark.long
@pytest.mark.long
def test_a_call_of_many_inputs_outlives_its_engine(
    embedder: RunningServer, keys: dict[str, str], oracle: Oracle
) -> None:
    inputs = [[5 + number % 50] * CONTEXT for number in range(500)]
    done = embedder.sample("cumulo:request_success_total", finished_reason="stop")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(post, embedder, keys, CAT | {"input": inputs})
        wait_for(
            lambda: embedder.sample("cumulo:request_success_total", finished_reason="stop") > done + 100,
            "a good part of it",
            embedder,
        )
        os.kill(embedder.engine_pid(), signal.SIGKILL)
        answer = call.result(120)
    assert embedder.sample("cumulo:engine_restarts") == 1, "the call was over before the engine was killed"
    assert answer.status_code == 200, answer.text
    got = np.array([item["embedding"] for item in answer.json()["data"]])
    assert got.shape == (500, 48)
    for index in (0, 49, 50, 499):
        expected = reference_embedding(oracle.model, inputs[index], "mean")
        np.testing.assert_allclose(got[index], expected, atol=2e-4)


def test_the_description_has_it(embedder: RunningServer) -> None:
    description = embedder.get("/openapi.json").json()
    operation = description["paths"]["/v1/embeddings"]["post"]
    assert set(operation["responses"]) == {"200", "400", "401", "404", "413", "429", "503"}
    schema = description["components"]["schemas"]["EmbeddingRequest"]
    assert schema["properties"]["model"]["enum"] == [NAME] and schema["additionalProperties"] is False
    assert {"input", "dimensions", "encoding_format", "user", "pooling"} <= set(schema["properties"])
