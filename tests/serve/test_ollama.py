"""Ollama's API as Open WebUI calls it (backend/open_webui/routers/ollama.py): names with tags, models that are
pulled, answered by, unloaded and deleted. Ollama's own client is tested in tests/clients.
"""

import json
import math
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from cumulo.models.files.hub import files_and_license
from cumulo.serve.api.ollama import models
from cumulo.serve.api.ollama.request import Conversing, Generating
from cumulo.serve.bodies.strict import settle_unknown
from cumulo.serve.errors import ApiError
from cumulo.serve.model_table import ServedModel
from tests.models.hub_server import Hub, running_hub
from tests.serve.running_server import (
    RunningServer,
    needs_built_in_model,
    quick_model,
    running_server,
    wait_for,
)

SMALL = ("--kv-memory-gib", "0.0625", "--max-running", "8", "--max-tokens-per-step", "256", "--no-console")
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none", "X-OpenWebUI-User-Name": "Ann"}
PULLED = "poet/small:latest"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        running.models["poet/small"] = {"small-Q4_K_M.gguf": Path(quick_model()).read_bytes()}
        yield running


@pytest.fixture(scope="module")
def webui(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("NO_PROXY", "127.0.0.1")
        options = ("--models", "pulled", "--hub", hub.url)
        with running_server(quick_model(), "--name", "first", *SMALL, *options) as running:
            yield running


def post(server: RunningServer, path: str, payload: Any, method: str = "POST") -> httpx.Response:
    """Open WebUI sends its bodies as text, and JSON in the header."""
    return httpx.request(method, server.url + path, content=json.dumps(payload), headers=HEADERS, timeout=300)


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def names(server: RunningServer, path: str) -> list[str]:
    return [one["model"] for one in server.get(path, headers=HEADERS).json()["models"]]


@needs_built_in_model
def test_the_built_in_model_has_a_date_and_a_license() -> None:
    entry = models._entry(ServedModel("mine", None, None))
    assert datetime.fromisoformat(entry["modified_at"]).year > 2020
    assert files_and_license(None)[1] == files_and_license("built-in")[1] == "apache-2.0"


@needs_built_in_model
@pytest.mark.long
def test_curl_without_a_content_type_is_understood(webui: RunningServer) -> None:
    asked = json.dumps({"model": names(webui, "/api/tags")[0], "prompt": "Hi", "stream": False})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{webui.url}/api/generate", content=asked, headers=form, timeout=300)
    assert answer.status_code == 200, answer.text
    foreign = form | {"Origin": "https://evil.example"}
    assert httpx.post(f"{webui.url}/api/generate", content=asked, headers=foreign).status_code == 403
    assert httpx.post(f"{webui.url}/v1/completions", content=asked, headers=form).status_code == 400


@needs_built_in_model
@pytest.mark.long
def test_a_connection_is_verified_and_models_are_listed(webui: RunningServer) -> None:
    version = webui.get("/api/version", headers=HEADERS).json()["version"]
    assert len(tuple(map(int, re.sub(r"^v|-.*", "", version).split(".")))) == 3
    assert names(webui, "/api/tags") == ["first:latest"]
    (running,) = webui.get("/api/ps").json()["models"]
    assert int(datetime.fromisoformat(running["expires_at"]).timestamp()) > 0
    assert running["name"] == running["model"] == "first:latest" and running["size"] > 1e7


@needs_built_in_model
@pytest.mark.long
def test_a_model_is_pulled_answers_is_unloaded_and_deleted(webui: RunningServer) -> None:
    told = lines(post(webui, "/api/pull", {"model": "poet/small", "name": "poet/small", "insecure": True}))
    assert told[0] == {"status": "pulling manifest"} and told[-1] == {"status": "success"}
    assert told[-2]["completed"] == told[-2]["total"] > 1e6 and told[-2]["digest"].startswith("sha256:")
    assert names(webui, "/api/tags") == ["first:latest", PULLED]
    assert names(webui, "/api/ps") == ["first:latest"]

    chat = {
        "model": PULLED,
        "messages": [{"role": "user", "content": "Hi"}],
        "options": {"num_predict": 4, "num_ctx": 2048},
    }
    streamed = lines(post(webui, "/api/chat", {**chat, "stream": True}))
    assert [one["done"] for one in streamed[-2:]] == [False, True] and streamed[-1]["eval_count"] == 4
    assert streamed[-1]["load_duration"] > 0
    whole = post(webui, "/api/chat", {**chat, "stream": False, "keep_alive": "10m"}).json()
    assert whole["done"] and whole["message"]["role"] == "assistant" and whole["done_reason"] == "length"
    openai = {"model": PULLED, "messages": chat["messages"], "max_tokens": 3, "stream": False}
    assert post(webui, "/v1/chat/completions", openai).json()["usage"]["completion_tokens"] == 3
    assert set(names(webui, "/api/ps")) == {"first:latest", PULLED}

    embedded = post(webui, "/api/embed", {"model": PULLED, "input": ["a", "b"], "truncate": True}).json()
    older = post(webui, "/api/embeddings", {"model": PULLED, "prompt": "a"}).json()
    assert older["embedding"] == pytest.approx(embedded["embeddings"][0], abs=1e-5)
    shown = post(webui, "/api/show", {"name": PULLED}).json()
    assert shown["license"] == "apache-2.0" and shown["details"]["quantization_level"]

    unloaded = post(webui, "/api/generate", {"model": PULLED, "keep_alive": 0, "prompt": ""}).json()
    assert unloaded["done_reason"] == "unload"
    wait_for(lambda: names(webui, "/api/ps") == ["first:latest"], "the unload", webui)
    assert post(webui, "/api/delete", {"model": PULLED, "name": PULLED}, "DELETE").status_code == 200
    assert names(webui, "/api/tags") == ["first:latest"]
    gone = post(webui, "/api/chat", chat)
    assert gone.status_code == 404 and "not served here" in gone.json()["error"]


@needs_built_in_model
@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "path", "payload", "status", "words"),
    [
        ("POST", "/api/pull", {"model": "poet/none"}, 400, "does not give poet/none"),
        ("POST", "/api/pull", {}, 400, "'model' is missing"),
        ("DELETE", "/api/delete", {"model": "poet/none"}, 404, "has not been pulled"),
        ("DELETE", "/api/delete", {"model": "first"}, 404, "has not been pulled"),
        ("POST", "/api/show", {"model": "nobody"}, 404, "not served here"),
        (
            "POST",
            "/api/chat",
            {"model": "first", "messages": [{"role": "user", "images": ["aa"]}]},
            400,
            "text only",
        ),
        ("POST", "/api/create", {"model": "mine"}, 404, "there is no /api/create here"),
    ],
)
def test_errors_have_ollamas_form(
    webui: RunningServer, method: str, path: str, payload: Any, status: int, words: str
) -> None:
    answer = post(webui, path, payload, method)
    assert (answer.status_code, list(answer.json())) == (status, ["error"]) and words in answer.json()[
        "error"
    ]


# -- without a server -------------------------------------------------------------------------------------
def read(kind: type[Conversing | Generating], **fields: Any) -> Any:
    body = kind.model_validate({"model": "m", **fields})
    settle_unknown(body)
    return body


HI = [{"role": "user", "content": "Hi"}]


def test_options_become_those_of_a_chat() -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "seed": 9,
        "stop": ["x"],
        "repeat_penalty": 1.5,
        "mirostat": 0,
    }
    chat = read(Conversing, messages=HI, options=options, think=False, format="json").as_chat()
    assert (chat.max_tokens, chat.temperature, chat.top_k, chat.seed) == (7, 0.5, 3, 9)
    assert (chat.stop, chat.repetition_penalty, chat.stream) == (["x"], 1.5, True)
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert chat.response_format.type == "json_object"
    assert read(Conversing, messages=HI, options={"num_predict": -1}).as_chat().max_tokens == 1 << 31
    assert read(Conversing, messages=HI, options={"num_predict": 0}).as_chat().max_tokens is None


def test_results_of_tools_find_their_calls() -> None:
    calls = [
        {"function": {"name": name, "arguments": {"n": n}}} for n, name in enumerate(("add", "mul", "add"))
    ]
    results = [
        {"role": "tool", "tool_name": "mul", "content": "m"},
        {"role": "tool", "name": "add", "content": "first"},
        {"role": "tool", "content": "second"},
    ]
    chat = read(Conversing, messages=[*HI, {"role": "assistant", "tool_calls": calls}, *results]).as_chat()
    ids = [call.id for call in chat.messages[1].tool_calls]
    assert [one.tool_call_id for one in chat.messages[2:]] == [ids[1], ids[0], ids[2]]
    assert json.loads(chat.messages[1].tool_calls[2].function.arguments) == {"n": 2}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5m", 300), (0, 0), ("0", 0), (-1, math.inf), ("-1m", math.inf), ("24h", 86400), (2.5, 2.5)],
)
def test_keep_alive_is_read(given: Any, seconds: float) -> None:
    assert read(Conversing, messages=HI, keep_alive=given).keep_s == seconds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["aa"]}, "images"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(Generating, prompt="Hi", **fields)
    assert refused.value.param == param
    with pytest.raises(ApiError, match="keep_alive"):
        _ = read(Generating, prompt="Hi", keep_alive="soon").keep_s
