"""What operators and tools see: health, models, tokens, metrics, explanations, the API's description."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from cumulo import __version__
from tests.cli.conftest import cumulo_process
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = needs_built_in_model
GREEDY: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 6,
}  # fmt: skip


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model


def test_health_readiness_and_version(server: RunningServer) -> None:
    for path in ("/health", "/ready"):
        answer = server.get(path)
        assert answer.status_code == 200
        assert answer.json()["engine"] == "ready" and answer.json()["restarts"] == 0
    assert server.get("/version").json() == {"version": __version__}


def test_text_becomes_tokens_and_text_again(server: RunningServer) -> None:
    text = "Tokenise this: naïve café, 数字 123."
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 8192
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == text


def test_messages_become_the_tokens_a_chat_is_charged_for(
    server: RunningServer, client: openai.OpenAI
) -> None:
    count = server.post("/tokenize", {"messages": GREEDY["messages"]}).json()["count"]
    usage = client.chat.completions.create(**GREEDY).usage
    assert usage is not None and usage.prompt_tokens == count


def test_metrics_count_what_was_served(server: RunningServer, client: openai.OpenAI) -> None:
    names = (
        "cumulo:prompt_tokens_total", "cumulo:generation_tokens_total", "cumulo:request_success_total",
        "cumulo:time_to_first_token_seconds_count", "cumulo:e2e_request_latency_seconds_count",
        "cumulo:request_queue_time_seconds_count", "cumulo:prefix_cache_queries_total",
        "cumulo:inter_token_latency_seconds_count",
    )  # fmt: skip
    before = {name: server.sample(name) for name in names}
    whole = client.chat.completions.create(**GREEDY)
    *_, last = client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    assert whole.usage is not None and last.usage is not None
    gained = {name: server.sample(name) - before[name] for name in names}
    prompts = whole.usage.prompt_tokens + last.usage.prompt_tokens
    assert gained["cumulo:prompt_tokens_total"] == gained["cumulo:prefix_cache_queries_total"] == prompts
    assert gained["cumulo:generation_tokens_total"] == (
        whole.usage.completion_tokens + last.usage.completion_tokens
    )
    assert gained["cumulo:inter_token_latency_seconds_count"] == last.usage.completion_tokens - 1
    for name in names[2:6]:
        assert gained[name] == 2, name
    assert server.sample("cumulo:request_success_total", finished_reason="length", model_name=MODEL) >= 2
    assert server.sample("cumulo:num_requests_running") == 0
    assert server.sample("cumulo:engine_up") == 1


def test_a_request_is_explained_in_words_and_numbers(server: RunningServer, client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    (story,) = server.get(f"/v1/requests/{chunks[0].id}/explain").json()["data"]
    assert story["state"] == "finished" and story["finish_reason"] == "length"
    assert story["tokens"]["output"] == 6
    times = story["times_ms"]
    assert 0 <= times["tokenised"] <= times["first_token"] <= times["total"]
    assert times["gap_median"] <= times["gap_max"]
    for words in (
        "prompt tokens",
        "queued",
        "prefix cache hit",
        "first token",
        "stopped at max_tokens after 6 tokens",
    ):
        assert words in story["summary"]


def test_a_call_of_several_prompts_has_several_stories(server: RunningServer, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=2)
    data = server.get(f"/v1/requests/{answer.id}/explain").json()["data"]
    assert [story["id"] for story in data] == [f"{answer.id}-0", f"{answer.id}-1"]
    assert server.get(f"/v1/requests/{answer.id}-1/explain").json()["data"] == [data[1]]


def test_a_trace_has_spans_that_follow_each_other(server: RunningServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY)
    trace = server.get(f"/v1/requests/{answer.id}/explain", params={"format": "trace"}).json()
    spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"tokenise", "answer", "queued", "prefill", "decode"} <= set(spans)
    for earlier, later in (("tokenise", "answer"), ("queued", "prefill"), ("prefill", "decode")):
        end = spans[earlier]["ts"] + spans[earlier]["dur"]
        assert spans[later]["ts"] == pytest.approx(end, abs=1)


def test_an_unknown_request_is_404(server: RunningServer) -> None:
    assert server.get("/v1/requests/chatcmpl-none/explain").status_code == 404
    assert (
        server.get("/v1/requests/x/explain", params={"format": "poem"}).json()["error"]["param"] == "format"
    )


@pytest.mark.long
def test_the_command_explains_a_request(server: RunningServer, client: openai.OpenAI, tmp_path: Path) -> None:
    answer = client.chat.completions.create(**GREEDY)
    trace = tmp_path / "trace.json"
    told = cumulo_process("explain", answer.id, "--server", server.url, "--trace", str(trace))
    assert told.code == 0, told.err
    assert "stopped at max_tokens after 6 tokens" in told.out and "admitted to step" in told.out
    assert json.loads(trace.read_text())["traceEvents"]
    missing = cumulo_process("explain", "chatcmpl-none", "--server", server.url)
    assert missing.code == 2 and "nothing is known" in missing.err


def test_every_answer_names_its_request(server: RunningServer) -> None:
    answer = server.post("/v1/chat/completions", GREEDY)
    assert answer.headers["x-request-id"] == answer.json()["id"]


def test_the_description_is_complete_and_says_400_not_422(server: RunningServer) -> None:
    description = server.get("/openapi.json").json()
    operations = {
        (method, path): operation
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    }
    for place in (
        ("post", "/v1/chat/completions"), ("post", "/v1/completions"), ("get", "/v1/models"),
        ("post", "/tokenize"), ("post", "/detokenize"), ("get", "/health"), ("get", "/metrics"),
    ):  # fmt: skip
        assert place in operations
    assert all("422" not in operation["responses"] for operation in operations.values())
    for path in ("/v1/chat/completions", "/v1/completions"):
        responses = operations["post", path]["responses"]
        assert set(responses) == {"200", "400", "401", "404", "413", "429", "503"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    properties = description["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "stream", "logprobs", "cache_salt", "top_k", "min_p"} <= set(properties)
    assert description["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
    assert properties["model"]["enum"] == [MODEL]


def test_other_web_origins_get_no_permission(server: RunningServer) -> None:
    answer = server.get("/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in answer.headers
