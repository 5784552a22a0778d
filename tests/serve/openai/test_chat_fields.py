"""/v1/chat/completions, asked by the official client: continued messages, beams, token ids and prompt
log-probabilities, the forms of tools that clients send."""

from typing import Any

import openai
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
BEGUN: list[Any] = [*QUESTION, {"role": "assistant", "content": "The capital of France is the city of"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
OTHER: dict[str, Any] = {"name": "time", "parameters": {"type": "object", "properties": {}}}


def as_tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


# -- continued messages -----------------------------------------------------------------------------------
def test_an_answer_continues_the_last_message(client: openai.OpenAI, server: RunningServer) -> None:
    fields = GREEDY | {"messages": BEGUN}
    answer: Any = client.chat.completions.create(
        **fields, extra_body={"continue_final_message": True, "return_token_ids": True}
    )
    open_end = {"messages": BEGUN, "continue_final_message": True}
    tokens = server.post("/tokenize", open_end).json()["tokens"]
    assert answer.prompt_token_ids == tokens
    shown = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert shown.endswith("<|im_start|>assistant\nThe capital of France is the city of")
    continued = client.completions.create(model=MODEL, prompt=tokens, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == continued.choices[0].text
    anew = client.chat.completions.create(**fields)
    assert anew.choices[0].message.content != answer.choices[0].message.content


def test_the_continued_text_is_repeated_when_asked_for(client: openai.OpenAI) -> None:
    fields = GREEDY | {"messages": BEGUN}
    extension = {"continue_final_message": True, "add_generation_prompt": False}
    plain = client.chat.completions.create(**fields, extra_body=extension).choices[0].message.content
    extension["echo"] = True
    echoed = client.chat.completions.create(**fields, extra_body=extension).choices[0].message.content
    assert echoed == BEGUN[-1]["content"] + (plain or "")
    chunks = list(client.chat.completions.create(**fields, stream=True, extra_body=extension))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == echoed
    assert chunks[0].choices[0].delta.role == "assistant"


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        (QUESTION, {}),
        (BEGUN, {"add_generation_prompt": True}),
        (
            [
                *QUESTION,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
            ],
            {},
        ),
    ],
)
def test_only_an_assistants_text_can_be_continued(
    server: RunningServer, messages: list[Any], more: dict[str, Any]
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"model": MODEL, "messages": messages, "continue_final_message": True} | more
        answer = server.post(path, body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "continue_final_message"


# -- tools ------------------------------------------------------------------------------------------------
def test_some_of_the_tools_may_be_allowed(client: openai.OpenAI, server: RunningServer) -> None:
    """All are shown, which keeps the prompt the same from turn to turn; only the allowed ones are called."""
    tools: Any = [as_tool(FUNCTION | {"strict": None}), as_tool(OTHER)]
    fields = GREEDY | {"tools": tools, "max_tokens": 60}
    named: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [as_tool({"name": "time"})]},
    }
    answer = client.chat.completions.create(**fields, tool_choice=named)
    calls: Any = answer.choices[0].message.tool_calls
    assert {call.function.name for call in calls} == {"time"}
    shown = server.post("/tokenize", {"messages": QUESTION, "tools": tools}).json()["count"]
    assert answer.usage is not None and answer.usage.prompt_tokens == shown


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        (
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tools[0]",
            "of the type 'function', not 'custom'",
        ),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice.type",
            "should be 'function'",
        ),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "missing"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
            "at least 1",
        ),
        ({"tool_choice": "always"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"functions": [OTHER]}, "functions", "write them as tools"),
    ],
)
def test_a_tool_of_another_kind_is_refused_in_words(
    server: RunningServer, change: dict[str, Any], param: str, words: str
) -> None:
    answer = server.post("/v1/chat/completions", GREEDY | {"tools": [as_tool(OTHER)]} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and words in answer.json()["error"]["message"]


# -- what comes with the answer ---------------------------------------------------------------------------
def test_token_ids_and_prompt_log_probabilities_come_with_a_chat(
    client: openai.OpenAI, server: RunningServer
) -> None:
    extension = {"return_token_ids": True, "ignore_eos": True}
    tokens = server.post("/tokenize", {"messages": QUESTION}).json()["tokens"]
    whole: Any = client.chat.completions.create(
        **GREEDY, extra_body=extension | {"prompt_logprobs": 1}, service_tier="flex", store=True
    )
    assert whole.service_tier == "default"
    assert whole.prompt_token_ids == tokens and len(whole.choices[0].token_ids) == 12
    assert whole.prompt_logprobs[0] is None
    for token, table in zip(tokens[1:], whole.prompt_logprobs[1:], strict=True):
        assert 1 <= len(table) <= 2 and table[str(token)]["rank"] >= 1
    chunks: list[Any] = list(client.chat.completions.create(**GREEDY, stream=True, extra_body=extension))
    assert chunks[0].prompt_token_ids == tokens
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert (
        server.post("/v1/chat/completions", GREEDY | {"prompt_logprobs": 1, "stream": True}).status_code
        == 400
    )


def test_every_chunk_has_the_counts_so_far_when_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[0] == 1
    assert chunks[-1].choices == [] and counts[-1] == counts[-2]


def test_a_chat_is_searched_with_beams(client: openai.OpenAI, server: RunningServer) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 6, "n": 2}
    answer = client.chat.completions.create(**fields, extra_body={"beam_width": 3})
    tokens = server.post("/tokenize", {"messages": QUESTION}).json()["tokens"]
    texts = client.completions.create(
        model=MODEL, prompt=tokens, max_tokens=6, n=2, extra_body={"beam_width": 3}
    )
    assert [c.message.content for c in answer.choices] == [choice.text for choice in texts.choices]
    for name, value in (("response_format", {"type": "json_object"}), ("tools", [as_tool(OTHER)])):
        refused = server.post("/v1/chat/completions", fields | {"beam_width": 3, name: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name


@pytest.mark.long
def test_heads_are_answered_like_gets(server: RunningServer) -> None:
    import httpx

    for path in ("/health", "/ready", "/version", "/v1/models", f"/v1/models/{MODEL}"):
        head, whole = httpx.head(server.url + path, timeout=60), server.get(path)
        assert head.status_code == whole.status_code == 200 and head.content == b""
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert httpx.head(f"{server.url}/v1/models/nobody", timeout=60).status_code == 404
    for method in ("HEAD", "OPTIONS", "PUT"):
        answer = httpx.request(method, f"{server.url}/v1/chat/completions", timeout=60)
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
