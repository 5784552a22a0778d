"""Tool calls through the official client: offered, forced, streamed, handed back, refused."""

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"type": "string", "maxLength": 10}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"{name} of a place", "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": TOOLS,
    "max_tokens": 100,
    "temperature": 0,
}


def check_calls(calls: Any) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.long
@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_a_demanded_call_comes_with_arguments_that_fit(
    client: openai.OpenAI, choice: Any, temperature: float
) -> None:
    fields = ASK | {
        "tool_choice": choice,
        "temperature": temperature,
        "seed": 5,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.create(**fields).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert answer.message.tool_calls is not None and len(answer.message.tool_calls) == 1
    check_calls(answer.message.tool_calls)
    if choice != "required":
        assert answer.message.tool_calls[0].function.name == "get_time"


@pytest.mark.long
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_streamed_call_comes_in_pieces_and_is_the_whole_call(client: openai.OpenAI, choice: Any) -> None:
    fields = ASK | {"tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls
    assert whole is not None
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert chunks[0].delta.role == "assistant" and chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)
    assert pieces[0].id and pieces[0].type == "function" and pieces[0].index == 0
    assert pieces[0].function.name == whole[0].function.name
    fragments = [piece.function.arguments for piece in pieces[1:]]
    assert len(fragments) > 2 and all(piece.id is None for piece in pieces[1:])
    assert "".join(fragments) == whole[0].function.arguments


def test_the_clients_own_accumulator_understands_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**ASK, tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    check_calls(final.message.tool_calls)


@pytest.mark.long
def test_several_calls_are_numbered_and_all_fit(speaking_server: RunningServer) -> None:
    fields = ASK | {"tool_choice": "required", "temperature": 1.0, "n": 2, "seed": 1, "max_tokens": 300}
    answer = speaking_server.client().chat.completions.create(**fields)
    whole = [choice for choice in answer.choices if choice.finish_reason == "tool_calls"]
    assert whole
    for choice in whole:
        check_calls(choice.message.tool_calls)
        ids = [call.id for call in choice.message.tool_calls or []]
        assert len(set(ids)) == len(ids)


@pytest.mark.long
def test_auto_without_a_call_is_text(client: openai.OpenAI) -> None:
    fields = ASK | {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    for choice in ("auto", None, "none"):
        answer = client.chat.completions.create(**(fields | {"tool_choice": choice})).choices[0]
        assert answer.message.tool_calls is None
        assert answer.message.content and answer.finish_reason in ("stop", "length")
        chunks = client.chat.completions.create(**(fields | {"tool_choice": choice}), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content


def test_tools_that_may_not_be_called_do_not_change_the_answer(client: openai.OpenAI) -> None:
    without = client.chat.completions.create(**{key: ASK[key] for key in ASK if key != "tools"})
    barred = client.chat.completions.create(**ASK, tool_choice="none")
    assert barred.choices[0].message.content == without.choices[0].message.content


def test_a_conversation_with_calls_and_results_goes_on(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**ASK, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 21 degrees"}
    fields = ASK | {"messages": [*ASK["messages"], message, result]}
    answer = client.chat.completions.create(**fields, tool_choice="none")
    assert answer.choices[0].message.content
    shorter = client.chat.completions.create(**ASK, tool_choice="none")
    assert answer.usage is not None and shorter.usage is not None
    assert answer.usage.prompt_tokens > shorter.usage.prompt_tokens + 20


def test_a_tool_without_parameters_is_called_with_none(client: openai.OpenAI) -> None:
    fields = ASK | {"tools": [{"type": "function", "function": {"name": "ping"}}], "tool_choice": "required"}
    answer = client.chat.completions.create(**fields, parallel_tool_calls=False)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None and json.loads(calls[0].function.arguments) == {}


def test_a_call_cut_short_says_length(client: openai.OpenAI) -> None:
    fields = ASK | {"tool_choice": NAMED, "max_tokens": 5}
    assert client.chat.completions.create(**fields).choices[0].finish_reason == "length"


def test_the_async_client_streams_calls_side_by_side(server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, name: str) -> Any:
        choice: Any = {"type": "function", "function": {"name": name}}
        stream = await client.chat.completions.create(**ASK, tool_choice=choice, stream=True)
        pieces = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
        return pieces[0].function.name, "".join(piece.function.arguments or "" for piece in pieces)

    async def together() -> list[Any]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, name) for name in [*SCHEMAS, *SCHEMAS]))

    for (name, arguments), asked in zip(asyncio.run(together()), [*SCHEMAS, *SCHEMAS], strict=True):
        assert name == asked
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}, message]}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": None, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool("two words")]}, "tools[0].function.name"),
        ({"tools": [tool(parameter={})]}, "tools[0].function.parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [tool(parameters={"type": "frob"})]}, "tools"),
        ({"tools": [tool(parameters={"not": {}}, strict=True)], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, "response_format"),
        ({"ignore_eos": True}, None),
        (said(role="tool", content="21"), "messages[1].tool_call_id"),
        (said(role="user", content="21", tool_call_id="a"), "messages[1].tool_call_id"),
        (said(role="user", content="x", tool_calls=[CALL]), "messages[1].tool_calls"),
        (said(role="assistant"), "messages[1].content"),
        (
            said(role="assistant", tool_calls=[CALL | {"function": {"name": "f", "arguments": "[]"}}]),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            said(role="assistant", content="x", function_call={"name": "f"}),
            "messages[1].function_call",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    server: RunningServer, change: Any, param: str | None, stream: bool
) -> None:
    response = server.post("/v1/chat/completions", ASK | change | {"stream": stream})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"]


def test_a_keyword_that_cannot_be_enforced_is_refused_only_of_strict_tools(client: openai.OpenAI) -> None:
    schema = WEATHER | {"not": {"required": ["country"]}}
    fields = ASK | {"tool_choice": "required", "parallel_tool_calls": False}
    loose = client.chat.completions.create(**(fields | {"tools": [tool("get_weather", parameters=schema)]}))
    check_calls(loose.choices[0].message.tool_calls)
    with pytest.raises(openai.BadRequestError, match="not"):
        client.chat.completions.create(
            **(fields | {"tools": [tool("get_weather", parameters=schema, strict=True)]})
        )
