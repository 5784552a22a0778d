"""/v1/responses, asked by the official client."""

import asyncio
import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]
ASK: dict[str, Any] = {
    "model": MODEL,
    "input": "What is the capital of France?",
    "temperature": 0,
    "max_output_tokens": 24,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.speaking
def test_an_input_is_answered_like_a_chat(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASK, metadata={"a": "b"})
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": ASK["input"]}], temperature=0, max_tokens=24
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "completed" and response.metadata == {"a": "b"}
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


@pytest.mark.speaking
def test_streamed_events_tell_the_whole_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    events: list[Any] = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage.model_copy(
        update={"input_tokens_details": events[-1].response.usage.input_tokens_details}
    )


@pytest.mark.speaking
def test_the_clients_own_accumulator_understands_the_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASK) as stream:
        final = stream.get_final_response()
    assert final.output_text == client.responses.create(**ASK).output_text


@pytest.mark.long
def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    fields = ASK | {"max_output_tokens": 2}
    response = client.responses.create(**fields)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(**fields, stream=True)
    assert last.type == "response.incomplete"


def test_instructions_and_earlier_items_are_part_of_the_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK, instructions="Be brief.")
    again: list[Any] = [{"role": "user", "content": ASK["input"]}]
    again += [item.model_dump() for item in first.output]
    again += [{"role": "user", "content": [{"type": "input_text", "text": "And of Italy?"}]}]
    second = client.responses.create(**(ASK | {"input": again}), instructions="Be brief.")
    assert second.output_text
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 10


def test_a_form_is_kept_to(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    jsonschema.validate(json.loads(client.responses.create(**ASK, text=form).output_text), SCHEMA)

    class Answer(pydantic.BaseModel):
        city: Literal["Paris", "Rome"]

    assert isinstance(client.responses.parse(**ASK, text_format=Answer).output_parsed, Answer)


def test_the_async_client_streams(server: RunningServer) -> None:
    async def ask() -> str:
        async with server.async_client() as client:
            events = await client.responses.create(**ASK, stream=True)
            return "".join(
                [event.delta async for event in events if event.type == "response.output_text.delta"]
            )

    assert asyncio.run(ask()) == server.client().responses.create(**ASK).output_text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": {"effort": "low", "summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
        ({"input": []}, "input"),
        ({"colour": "red"}, "colour"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "frob"}}}}, "text.format"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    server: RunningServer, change: Any, param: str, stream: bool
) -> None:
    response = server.post("/v1/responses", ASK | change | {"stream": stream})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
