"""Thoughts, texts and calls as content blocks and as items: a stream, however cut, adds up to the whole answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.serve.api.anthropic.messages import MessageAnswer, Thoughts
from cumulo.serve.api.anthropic.request import MessagesRequest, as_chat
from cumulo.serve.api.openai.answer_form import AnswerReader
from cumulo.serve.api.responses.items import Output
from cumulo.serve.formats.reasoning import ReasoningParser
from cumulo.serve.formats.tool_calls import ToolCallParser

SAID = (
    "<think>\nTwo cities: é, ☃.\n</think>\n\nI look it up.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
CUTS = st.lists(st.integers(0, len(SAID)), max_size=30).map(sorted)


def reader() -> AnswerReader:
    return AnswerReader(ReasoningParser(), ToolCallParser("hermes", ["weather"]))


def pieces(cuts: list[int]) -> list[str]:
    return [SAID[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(SAID)], strict=True)]


@given(CUTS)
def test_content_blocks_add_up(cuts: list[int]) -> None:
    whole = MessageAnswer(reader(), "shown")
    whole.add(SAID, last=True)
    content = whole.content()
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert content[0]["thinking"] == "Two cities: é, ☃." and content[1]["text"] == "I look it up."
    assert set(content[1]) == {"type", "text"}  # a field that is null breaks clients that check types
    assert [block["input"] for block in content[2:]] == [{"city": "Paris"}, {"city": "Rome"}]

    streamed = MessageAnswer(reader(), "shown")
    parts = pieces(cuts)
    events = [e for n, part in enumerate(parts) for e in streamed.add(part, last=n == len(parts) - 1)]
    made: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    open_block = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(made)
            open_block = event["index"]
            made.append(dict(event["content_block"]))
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            kind, block = event["delta"]["type"], made[-1]
            if kind == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + event["delta"]["partial_json"]
            else:
                name = kind.removesuffix("_delta")
                block[name] += event["delta"][name]
    for index, text in arguments.items():
        made[index]["input"] = json.loads(text)
    assert open_block is None
    for block in (*made, *content):
        block.pop("id", None)  # random
    assert made == content


@pytest.mark.parametrize(("thoughts", "kinds"), [("dropped", ["text"]), ("omitted", ["thinking", "text"])])
def test_thoughts_may_be_left_out(thoughts: Thoughts, kinds: list[str]) -> None:
    answer = MessageAnswer(AnswerReader(ReasoningParser(opened=True), None), thoughts)
    events = answer.add("secret</think>open", last=True)
    assert [block["type"] for block in answer.content()] == kinds
    assert "secret" not in json.dumps([events, answer.content()]) and "open" in json.dumps(events)


@given(CUTS)
def test_items_add_up(cuts: list[int]) -> None:
    whole, streamed = (Output("resp_1", reader(), None) for _ in range(2))
    whole.add(SAID, last=True)
    whole.close("stop")
    parts = pieces(cuts)
    events = [e for n, part in enumerate(parts) for e in streamed.add(part, last=n == len(parts) - 1)]
    events += streamed.close("stop")
    assert [item["type"] for item in whole.items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed.items
    for place, (item, same) in enumerate(zip(whole.items, streamed.items, strict=True)):
        assert {**item, "call_id": ""} == {**same, "call_id": ""}  # random
        told = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas[place] == told


def test_thinking_sets_the_templates_variable_and_thoughts_come_back() -> None:
    def chat(**more: Any) -> Any:
        said = [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Four."},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
        ]
        results = [
            {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "no such file"},
            {"type": "text", "text": "And now?"},
        ]
        messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]
        return as_chat(
            MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": messages, **more})
        )

    assert chat().chat_template_kwargs is None
    for kind, enabled in (("enabled", True), ("disabled", False)):
        asked = chat(thinking={"type": kind}, output_config={"effort": "low"})
        assert asked.chat_template_kwargs == {"enable_thinking": enabled} and asked.reasoning_effort == "low"
    user, assistant, tool, last = chat().messages
    assert (user.role, user.content) == ("user", "a\n\nb")
    assert (assistant.reasoning_content, assistant.content) == ("Hm.", "Four.")
    assert json.loads(assistant.tool_calls[0].function.arguments) == {"a": 1}
    assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "1", "Error: no such file")
    assert (last.role, last.content) == ("user", "And now?")
