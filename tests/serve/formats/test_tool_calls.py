"""Parsers of tool calls: the same events however the answer is cut, and nothing of it lost."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.serve.formats.events import Text, ToolCallArguments, ToolCallStart, mistral_call_id
from cumulo.serve.formats.tool_calls import ToolCallParser, _ObjectEnd, detect_tool_format
from tests import thorough
from tests.serve.formats.event_tools import calls_of, counted_ids, cut, parse, text_of

pytestmark = pytest.mark.long

NAMES = ["get_weather", "add", "f.g-h_2"]
FORMATS = ["hermes", "llama3", "mistral", "mistral_args"]


def make(tool_format: str):
    return ToolCallParser(tool_format, NAMES, counted_ids())


def written(tool_format: str, calls) -> str:
    """Calls as a model of this format writes them."""
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if tool_format == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    if tool_format == "llama3":
        return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    if tool_format == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab\"\\{}[]<>/:, \né_;", max_size=12)
    | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\"{", max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text('abc"}', min_size=1, max_size=4), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 1000), max_size=12)
# Whatever a model might write: markers whole and in part, calls whole and in part, and text.
DEBRIS = st.lists(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", "<tool_", "</", "<", ">", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[", "]",
            "[CALL_ID]ab12", "<|python_tag|>", "<|py", "{", "}", '{"name": "add", "arguments": {"a": 1}}',
            '{"name": "add", "parameters": {}}', '{"arguments": {"b": "x"}, "name": "add"}', '{"name": "add"',
            '"arguments": ', '{"name": 3}', '{"name": "other", "parameters": {"x": [1, {"y": 2}]}}', "add", "Hi.",
            " ", "\n", ";", ", ", '"', "\\", "null", '{"name": "add", "arguments": null}', "a < b",
            '{"name": "add", "arguments": "{\\"c\\": 1}"}', '{"name": ""}', "é", ":", "12",
        ]
    ),
    max_size=10,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("tool_format", FORMATS)
@settings(max_examples=thorough.examples(300), deadline=None)
@given(text=DEBRIS, cuts=CUTS)
def test_how_an_answer_is_cut_does_not_matter(tool_format, text, cuts):
    whole = parse(make(tool_format), [text])
    assert parse(make(tool_format), cut(text, cuts)) == whole
    assert parse(make(tool_format), list(text)) == whole


@pytest.mark.parametrize("tool_format", FORMATS)
@settings(max_examples=thorough.examples(300), deadline=None)
@given(text=DEBRIS)
def test_an_answer_without_a_call_comes_back_as_it_was(tool_format, text):
    events = parse(make(tool_format), list(text))
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert text_of(events) == text
    else:  # of the rest, white space next to calls may go
        shown = re.sub(r"\s", "", text_of(events))
        position = 0
        for character in re.sub(r"\s", "", text):  # what is shown is a subsequence of what was written
            if position < len(shown) and shown[position] == character:
                position += 1
        assert position == len(shown)


@pytest.mark.parametrize("tool_format", FORMATS)
@settings(max_examples=thorough.examples(150), deadline=None)
@given(calls=CALLS, cuts=CUTS)
def test_calls_come_out_as_they_were_meant(tool_format, calls, cuts):
    events = parse(make(tool_format), cut(written(tool_format, calls), cuts))
    assert calls_of(events) == calls
    assert text_of(events) == ""
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [start.id for start in starts] == [f"call-{index}" for index in range(len(calls))]


@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "mistral_args"])
@settings(max_examples=thorough.examples(100), deadline=None)
@given(before=st.text("ab <[/\n", max_size=12), calls=CALLS, cuts=CUTS)
def test_text_before_calls_streams_without_any_part_of_a_marker(tool_format, before, calls, cuts):
    parser, shown = make(tool_format), ""
    for piece in cut(before + written(tool_format, calls), cuts):
        shown += text_of(parser.push(piece))
        assert before.startswith(shown)
    parser.finish()
    assert shown == before.rstrip()


@pytest.mark.parametrize("tool_format", FORMATS)
def test_arguments_stream_while_they_are_written(tool_format):
    parser = make(tool_format)
    text = written(tool_format, [("add", {"a": "x" * 50})])
    events = [parser.push(character) for character in text]
    fragments = sum(isinstance(event, ToolCallArguments) for group in events for event in group)
    assert fragments > 50


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        ("hermes", "<tool_call><tool_call>" + '{"name":"add","arguments":{}}}</tool_call> bye',
         [Text("<tool_call>"), ToolCallStart(0, "call-0", "add"), ToolCallArguments(0, "{}"), Text("} bye")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1',
         [ToolCallStart(0, "call-0", "add"), ToolCallArguments(0, '{"a": 1')]),
        ("hermes", '<tool_call>{"name": "add"', [Text('<tool_call>{"name": "add"')]),
        ("hermes", '<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call>',
         [ToolCallStart(0, "call-0", "add"), ToolCallArguments(0, '{"a": 1}')]),
        ("hermes", '<tool_call>{"name":"add"}</tool_',
         [ToolCallStart(0, "call-0", "add"), ToolCallArguments(0, "{}")]),
        ("llama3", '{"name": "Alice", "age": 3}', [Text('{"name": "Alice", "age": 3}')]),
        ("llama3", 'Use {"name": "add", "parameters": {}}', [Text('Use {"name": "add", "parameters": {}}')]),
        ("llama3", "<|python_tag|>print(1)", [Text("<|python_tag|>print(1)")]),
        ("llama3", 'Hm.<|python_tag|>{"name": "any", "parameters": {"x": 1}}',
         [Text("Hm."), ToolCallStart(0, "call-0", "any"), ToolCallArguments(0, '{"x": 1}')]),
        ("mistral", "[TOOL_CALLS] [1, 2]", [Text("[TOOL_CALLS] [1, 2]")]),
        ("mistral", "[TOOL_CALLS] are what I write", [Text("[TOOL_CALLS] are what I write")]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}},',
         [ToolCallStart(0, "call-0", "add"), ToolCallArguments(0, "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> bye',
         [ToolCallStart(0, "call-0", "add"), ToolCallArguments(0, '{"a": 1}'), Text(" bye")]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "VvvODy9mT"}]',
         [ToolCallStart(0, "call-0", "add"), ToolCallArguments(0, '{"a": 1}')]),
        ("mistral_args", '[TOOL_CALLS]add[CALL_ID]x9[ARGS]{"a": "}"} done',
         [ToolCallStart(0, "call-0", "add"), ToolCallArguments(0, '{"a": "}"}'), Text(" done")]),
    ],
)  # fmt: skip
def test_what_models_get_wrong_or_leave_unfinished(tool_format, text, expected):
    assert parse(make(tool_format), list(text)) == expected


def test_no_character_is_read_over_and_over(monkeypatch):
    find, count = _ObjectEnd.find, 0

    def counted(end, text):
        nonlocal count
        count += len(text)
        return find(end, text)

    monkeypatch.setattr(_ObjectEnd, "find", counted)
    text = '<tool_call>{"x":"' * 1000  # every one of these looks like the beginning of a call
    parser = ToolCallParser("hermes")
    assert text_of([e for letter in text for e in parser.push(letter)] + parser.finish()) == text
    assert count <= 2 * len(text)


def test_ids_are_unique_and_fit_their_format():
    assert re.fullmatch("[A-Za-z0-9]{9}", mistral_call_id())
    ids = set()
    for _ in range(50):
        events = ToolCallParser("hermes").push(written("hermes", [("add", {})] * 2))
        ids |= {event.id for event in events if isinstance(event, ToolCallStart)}
    assert len(ids) == 100


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}... within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{...}", "hermes"),
        ("{{- '[TOOL_CALLS] [' }}{% for tool_call in message.tool_calls %}", "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_args"),
        ("{{- '<|start_header_id|>assistant<|end_header_id|>' }}{{- '<|python_tag|>' + call }}", "llama3"),
        ("<|start_header_id|>user {%- if tools is not none %}", "llama3"),
        ("{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}", None),
        (None, None),
    ],
)
def test_the_format_is_read_off_the_chat_template(template, expected):
    assert detect_tool_format(template) == expected
