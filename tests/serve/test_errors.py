"""What cannot be served is refused at once, by name, in OpenAI's shape."""

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model, wait_for

pytestmark = needs_built_in_model
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/chat/completions", {"frobnicate": 1}, "frobnicate"),
        ("/v1/chat/completions", {"tool_choice": "auto"}, "tool_choice"),
        ("/v1/chat/completions", {"reasoning_effort": "lots"}, "reasoning_effort"),
        ("/v1/chat/completions", {"store": "yes"}, "store"),
        ("/v1/chat/completions", {"audio": {}}, "audio"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "Hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"temperature": "0.5"}, "temperature"),
        ("/v1/chat/completions", {"temperature": True}, "temperature"),
        ("/v1/chat/completions", {"top_p": 0}, "top_p"),
        ("/v1/chat/completions", {"repetition_penalty": 5e-324}, "repetition_penalty"),  # overflows logits
        ("/v1/chat/completions", {"n": 0}, "n"),
        ("/v1/chat/completions", {"n": 1.5}, "n"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 3}, "max_tokens"),
        ("/v1/chat/completions", {"seed": 1 << 70}, "seed"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logit_bias": {"word": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ("/v1/completions", {"suffix": "end"}, "suffix"),
        ("/v1/completions", {"echo": "yes"}, "echo"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"n": 3, "best_of": 2}, "best_of"),
        ("/v1/completions", {"stream": True, "best_of": 2}, "best_of"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/tokenize", {"messages": CHAT["messages"], "max_tokens": 1}, "max_tokens"),
        ("/detokenize", {"tokens": [10_000_000], "prompt": 1}, "prompt"),
    ],
)
def test_a_wrong_field_is_named(server: RunningServer, path: str, change: Any, param: str) -> None:
    base = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}.get(path, {})
    error = error_of(server.post(path, base | change))
    assert error["param"] == param
    assert param.split(".")[-1].split("[")[0] in error["message"]
    assert "validation" not in error["message"]  # a library's word
    assert error["type"] == "invalid_request_error"


def test_parts_of_a_message_that_are_no_text_are_named(server: RunningServer) -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    error = error_of(server.post("/v1/chat/completions", CHAT | {"messages": [picture]}))
    assert error["param"].startswith("messages[0].content")
    assert "reads text only (parts of type 'text'), not 'image_url'" in error["message"]


def test_a_misspelt_field_gets_the_nearest_name(server: RunningServer) -> None:
    error = error_of(server.post("/v1/chat/completions", CHAT | {"max_token": 3}))
    assert error["message"] == "'max_token' is not a field this server knows; did you mean 'max_tokens'?"
    assert (error["param"], error["code"]) == ("max_token", "unknown_parameter")
    message = {"role": "user", "conten": "Hi"}
    error = error_of(server.post("/v1/chat/completions", CHAT | {"messages": [message]}))
    assert error["param"] == "messages[0].conten" and "did you mean 'content'?" in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"{" * 100_000, b"[" * 200_000, b'{"a": 1e999999}', b"\xff\xfe"],
)
def test_a_malformed_body_is_400(server: RunningServer, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        response = httpx.post(
            server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60
        )
        assert error_of(response)["message"]


def test_numbers_json_does_not_have_are_400(server: RunningServer) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "9" * 5000):
        body = json.dumps(CHAT)[:-1] + f', "temperature": {number}}}'
        error_of(
            httpx.post(
                f"{server.url}/v1/chat/completions",
                content=body,
                headers={"Content-Type": "application/json"},
                timeout=60,
            )
        )


def test_a_lone_surrogate_is_400(server: RunningServer) -> None:
    body = json.dumps(TEXT | {"prompt": "broken \ud800 text"})  # escaped, so valid JSON
    for path in ("/v1/completions", "/tokenize"):
        content = body if path == "/v1/completions" else json.dumps({"prompt": "\ud800"})
        response = httpx.post(
            server.url + path, content=content, headers={"Content-Type": "application/json"}, timeout=60
        )
        assert "surrogate" in error_of(response)["message"]
    odd = {"role": "user", "content": [{"type": "\ud800", "text": "x"}]}
    for change in ({"messages": [odd]}, {"max_tokens\ud800": 3}):
        response = httpx.post(
            server.url + "/v1/chat/completions",
            content=json.dumps(CHAT | change),
            headers={"Content-Type": "application/json"},
            timeout=60,
        )
        error_of(response)


def test_an_unknown_model_is_404(server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**(CHAT | {"model": "gpt-17"}))
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")
    long = server.post("/v1/chat/completions", CHAT | {"model": "x" * 1_000_000})
    assert long.status_code == 404 and len(long.text) < 1000, "the name is told in full"


def test_an_unknown_place_and_method_are_said_so(server: RunningServer) -> None:
    assert "/v1/nowhere" in error_of(server.get("/v1/nowhere"), 404)["message"]
    assert "use POST" in error_of(server.get("/v1/completions"), 405)["message"]


def test_an_over_long_prompt_is_refused_with_both_numbers(
    server: RunningServer, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"the prompt has 9,000 tokens.*8,192") as caught:
        client.completions.create(**(TEXT | {"prompt": [5] * 9000}))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="no prompt of more than 270,336 bytes is read"):
        client.completions.create(**(TEXT | {"prompt": "x" * 3_000_000}))
    with pytest.raises(openai.BadRequestError, match="shorten the prompt"):
        client.chat.completions.create(**(CHAT | {"messages": [{"role": "user", "content": "word " * 9000}]}))


def test_what_only_the_engine_knows_is_refused_too_even_when_streamed(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="token ids are 0 to"):
            client.completions.create(**(TEXT | {"prompt": [1_000_000]}), stream=stream)
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            client.completions.create(**TEXT, logit_bias={"99999999": 1}, stream=stream)


def test_a_million_stop_strings_are_refused_and_others_do_not_wait(server: RunningServer) -> None:
    stops = [str(number) for number in range(300_000)]
    error = error_of(server.post("/v1/chat/completions", CHAT | {"stop": stops}))
    assert "more than 65,536 strings" in error["message"]  # refused before anything is made of them
    assert error_of(server.post("/v1/chat/completions", CHAT | {"stop": stops[:60_000]}))["param"] == "stop"
    assert error_of(server.post("/v1/chat/completions", CHAT | {"stop": ["x" * 10_000]}))["param"].startswith(
        "stop"
    )
    assert server.status("/health") == 200


def test_a_huge_body_is_413_whether_its_length_is_told_or_not(server: RunningServer) -> None:
    body = json.dumps(TEXT | {"prompt": "x" * (5 << 20)}).encode()
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/completions"
    told = httpx.post(url, content=body, headers=headers, timeout=60)
    assert error_of(told, 413)["code"] == "request_too_large"

    def pieces() -> Any:  # sent in chunks, without Content-Length
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    try:
        untold = httpx.post(url, content=pieces(), headers=headers, timeout=60)
    except httpx.WriteError:
        return  # the server answered and hung up before everything was sent: refused as well
    assert error_of(untold, 413)["message"]


def test_the_log_holds_no_prompt(server: RunningServer, client: openai.OpenAI) -> None:
    client.completions.create(**(TEXT | {"prompt": "xyzzy-secret-prompt"}))
    server.post("/v1/completions", TEXT | {"prompt": "xyzzy-secret-prompt", "bogus": 1})
    # Whoever asks is answered before the log is written; the line of the last answer comes last.
    lines = r"POST /v1/completions 200[\s\S]*POST /v1/completions 400"
    wait_for(lambda: re.search(lines, server.log), "both lines of the log", server)
    assert "xyzzy" not in server.log
