"""OpenAI's own client against a real server: a tool loop, streams, objects, texts, vectors, files and batches."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model, wait_for

pytestmark = [needs_built_in_model, pytest.mark.long]

PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WARM = "How warm is it in Paris?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {
    "name": "temperature",
    "description": "The temperature in a city.",
    "parameters": SCHEMA,
    "strict": True,
}
SHORT: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 64}


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def test_chat_calls_a_tool_and_answers_its_result(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": WARM}]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    chosen: Any = {"type": "function", "function": {"name": "temperature"}}
    first = client.chat.completions.create(**SHORT, messages=messages, tools=tools, tool_choice=chosen)
    message = first.choices[0].message
    assert message.tool_calls and first.choices[0].finish_reason in ("stop", "tool_calls")
    messages.append(message)
    for call in message.tool_calls:
        assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Paris"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees"})
    last = client.chat.completions.create(**SHORT, messages=messages, tools=tools, tool_choice="none")
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls


def test_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**SHORT, messages=PARIS) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert len(pieces) > 3 and "".join(pieces) == whole.choices[0].message.content
    assert whole.choices[0].message.content == (
        client.chat.completions.create(**SHORT, messages=PARIS).choices[0].message.content
    )


def test_chat_gives_objects(client: openai.OpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "Ann is 42 years old."}]
    answer = client.chat.completions.parse(**SHORT, messages=question, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ann", age=42)


def test_responses_call_a_tool_and_answer_its_result(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 64}
    tools: Any = [{"type": "function", **FUNCTION}]
    chosen: Any = {"type": "function", "name": "temperature"}
    first = client.responses.create(**asked, input=WARM, tools=tools, tool_choice=chosen)
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and json.loads(calls[0].arguments) == {"city": "Paris"}
    outputs: Any = [
        {"type": "function_call_output", "call_id": c.call_id, "output": "21 degrees"} for c in calls
    ]
    last = client.responses.create(
        **asked, input=outputs, tools=tools, tool_choice="none", previous_response_id=first.id
    )
    assert last.status in ("completed", "incomplete") and last.output_text


def test_responses_stream_and_give_objects(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 64}
    with client.responses.stream(**asked, input="What is the capital of France?") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        whole = stream.get_final_response()
    assert len(pieces) > 3 and "".join(pieces) == whole.output_text and "Paris" in whole.output_text
    parsed = client.responses.parse(**asked, input="Ann is 42 years old.", text_format=Person)
    assert parsed.output_parsed == Person(name="Ann", age=42)


def test_completions_continue_texts(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    texts = ["The capital of France is", "One, two, three,"]
    whole = client.completions.create(**asked, prompt=texts, logprobs=0)
    assert "Paris" in whole.choices[0].text and [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.token_logprobs
    streamed = ["", ""]
    for chunk in client.completions.create(**asked, prompt=texts, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in whole.choices]


def test_texts_become_vectors(client: openai.OpenAI) -> None:
    data = client.embeddings.create(model=MODEL, input=["the cat", "the mat"]).data
    assert [len(item.embedding) for item in data] == [576, 576]


def test_a_file_of_requests_runs_as_a_batch(client: openai.OpenAI, server: RunningServer) -> None:
    lines = [
        {
            "custom_id": f"{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**SHORT, "messages": PARIS},
        }
        for n in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    uploaded = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch's end", server)
    output = client.batches.retrieve(batch.id).output_file_id
    assert output
    answers = [json.loads(one) for one in client.files.content(output).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == ["0", "1", "2"]
    for answer in answers:
        assert "Paris" in answer["response"]["body"]["choices"][0]["message"]["content"]
