"""Function calling, continued responses and log-probabilities of /v1/responses, with OpenAI's own client."""

import json
import math
from typing import Any

import openai
import pydantic
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = needs_built_in_model

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": None, "strict": None}
ASK: dict[str, Any] = {
    "model": MODEL,
    "input": "How is the weather in Paris?",
    "temperature": 0,
    "max_output_tokens": 60,
}
CALL: dict[str, Any] = {
    "tools": [WEATHER, CLOCK],
    "tool_choice": {"type": "function", "name": "weather"},
    "parallel_tool_calls": False,
}


@pytest.mark.long
@pytest.mark.speaking
def test_a_tool_loop_continues_by_id(client: openai.OpenAI) -> None:
    called = client.responses.create(**ASK, **CALL, instructions="Answer like a pirate.")
    (call,) = called.output
    assert call.type == "function_call" and call.id is not None and call.id.startswith("fc_")
    assert called.id.startswith("resp_") and call.name == "weather" and call.status == "completed"
    assert set(json.loads(call.arguments)) == {"city"}
    assert called.model_dump()["tool_choice"] == CALL["tool_choice"] and len(called.tools) == 2
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    by_id = client.responses.create(
        **ASK | {"input": [result]}, tools=CALL["tools"], tool_choice="none", previous_response_id=called.id
    )
    items: Any = [{"role": "user", "content": ASK["input"]}, *called.output, result]
    whole = client.responses.create(**ASK | {"input": items}, tools=CALL["tools"], tool_choice="none")
    # The same prompt either way: the first one's instructions are not taken over.
    assert "sunny" in by_id.output_text.lower() and by_id.output_text == whole.output_text
    assert by_id.previous_response_id == called.id
    assert by_id.usage is not None and whole.usage is not None
    assert by_id.usage.input_tokens == whole.usage.input_tokens


@pytest.mark.long
@pytest.mark.speaking
def test_a_streamed_call_is_told_in_the_official_order(client: openai.OpenAI) -> None:
    events: list[Any] = list(client.responses.create(**ASK, **CALL, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    fragments = "".join(event.delta for event in events[3:-3])
    final = events[-1].response
    assert fragments == events[-3].arguments == final.output[0].arguments
    with client.responses.stream(**ASK, **CALL) as stream:
        accumulated: Any = stream.get_final_response()
    assert accumulated.output[0].arguments == fragments


def test_allowed_tools_are_the_only_ones_called(client: openai.OpenAI) -> None:
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "clock"}],
    }
    response = client.responses.create(**ASK, tools=CALL["tools"], tool_choice=allowed)
    assert {item.name for item in response.output if item.type == "function_call"} == {"clock"}


def test_the_client_parses_arguments_of_a_pydantic_tool(client: openai.OpenAI) -> None:
    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=12)

    tools: Any = [openai.pydantic_function_tool(Weather)]
    response = client.responses.parse(**ASK, tools=tools, tool_choice="required")
    call: Any = response.output[0]
    assert isinstance(call.parsed_arguments, Weather)


@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER], "tool_choice": "auto"}])
def test_log_probabilities_belong_to_the_text(client: openai.OpenAI, tools: Any) -> None:
    fields: Any = ASK | {
        "max_output_tokens": 8,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole: Any = client.responses.create(**fields, **tools).output[0]
    part = whole.content[0]
    assert "".join(entry.token for entry in part.logprobs).startswith(part.text)
    for entry in part.logprobs:
        assert len(entry.top_logprobs) == 2
        assert math.isclose(entry.logprob, entry.top_logprobs[0].logprob, abs_tol=1e-4)  # greedy
    events: list[Any] = list(client.responses.create(**fields, **tools, stream=True))
    streamed = [e for event in events if event.type == "response.output_text.delta" for e in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in part.logprobs]
    without: Any = client.responses.create(**ASK | {"max_output_tokens": 4}).output[0]
    assert without.content[0].logprobs == []


def test_a_stored_response_is_read_listed_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK, metadata={"a": "b"})
    second = client.responses.create(**ASK | {"input": "And in Rome?"}, previous_response_id=first.id)
    assert client.responses.retrieve(first.id) == first and first.model_dump()["store"] is True
    items: Any = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert [item.content[0].text for item in items] == [ASK["input"], first.output_text, "And in Rome?"]
    page: Any = client.responses.input_items.list(second.id, limit=1)
    assert page.has_more and page.data[0].content[0].text == "And in Rome?"
    behind: Any = client.responses.input_items.list(second.id, limit=5, after=page.data[0].id)
    assert [item.role for item in behind.data] == ["assistant", "user"] and not behind.has_more
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(first.id)
    # Each is complete in itself: what continues a deleted one goes on.
    assert client.responses.create(**ASK, previous_response_id=second.id).output_text


def test_what_is_not_stored_cannot_be_continued(client: openai.OpenAI) -> None:
    unkept = client.responses.create(**ASK | {"max_output_tokens": 2}, store=False)
    with pytest.raises(openai.NotFoundError, match="store: false") as caught:
        client.responses.create(**ASK, previous_response_id=unkept.id)
    assert caught.value.param == "previous_response_id"


def test_a_story_is_found_by_the_responses_id(server: RunningServer, client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(**ASK | {"max_output_tokens": 2})
    response_id = raw.parse().id
    assert raw.headers["x-request-id"] == response_id
    assert server.get(f"/v1/requests/{response_id}/explain").json()["id"] == response_id
