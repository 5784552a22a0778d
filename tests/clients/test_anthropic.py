"""Anthropic's own client against a real server: a tool loop, a stream, and an object by way of a tool."""

from typing import Any

import pytest

from tests import peers
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "temperature", "description": "The temperature in a city.", "input_schema": SCHEMA}
SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "extra_body": {"temperature": 0}}
PARIS = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture
def client(server: RunningServer) -> Any:
    return peers.anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def test_a_tool_is_called_and_its_result_answered(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Paris?"}]
    chosen = {"type": "tool", "name": "temperature"}
    first = client.messages.create(**SHORT, messages=messages, tools=[TOOL], tool_choice=chosen)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and calls[0].input == {"city": "Paris"}
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"} for call in calls]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = client.messages.create(**SHORT, messages=messages, tools=[TOOL], tool_choice={"type": "none"})
    assert last.content[0].type == "text" and last.content[0].text


def test_a_stream_is_the_answer_in_pieces(client: Any) -> None:
    with client.messages.stream(**SHORT, messages=[PARIS]) as stream:
        pieces = list(stream.text_stream)
        whole = stream.get_final_message()
    assert len(pieces) > 3 and "".join(pieces) == whole.content[0].text and "Paris" in whole.content[0].text
    again = client.messages.create(**SHORT, messages=[PARIS])
    assert again.content[0].text == whole.content[0].text
    assert again.usage.output_tokens == whole.usage.output_tokens


def test_a_streamed_tool_call_is_an_object(client: Any) -> None:
    question = [{"role": "user", "content": "How warm is it in Rome?"}]
    chosen = {"type": "tool", "name": "temperature"}
    with client.messages.stream(**SHORT, messages=question, tools=[TOOL], tool_choice=chosen) as stream:
        whole = stream.get_final_message()
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert calls[0].name == "temperature" and calls[0].input == {"city": "Rome"}


def test_the_tool_runner_asks_calls_and_ends(client: Any) -> None:
    asked = []

    @peers.anthropic.beta_tool
    def temperature(city: str) -> str:
        """The temperature in a city."""
        asked.append(city)
        return "21 degrees"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        extra_body={"temperature": 0},
        tools=[temperature],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=[{"role": "user", "content": "How warm is it in Paris?"}],
        max_iterations=2,
    )
    answers = list(runner)
    assert asked == ["Paris"] * len(asked) and asked
    assert answers[0].stop_reason == "tool_use" and len(answers) == 2
