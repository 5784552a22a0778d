"""`tools` together with `response_format`: the answer is a call that fits its tool, or a text that has the form."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from cumulo.engine.guides.guided import Guidance
from cumulo.errors import InvalidRequest
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.serve.formats.forcing import tool_guide
from cumulo.serve.formats.tool_calls import ToolFormat
from cumulo.serve.model_text import ModelText
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
ASK: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Who is Ann?"}], "tools": [TOOL],
    "response_format": FORM, "max_tokens": 120, "temperature": 1.0, "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return ModelText.load(None).tokenizer


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}]'),
    ],
)
def test_either_calls_or_the_form_fit_and_nothing_else(
    tokenizer: Tokenizer, tool_format: ToolFormat, call: str
) -> None:
    rule = f"%json {json.dumps(PERSON)}"
    guide = tool_guide(tool_format, [TOOL], "auto", tokenizer, answer_rule=rule)
    assert guide is not None
    end = 2
    guidance = Guidance(tokenizer, tokenizer.vocab_size, (end,))

    def fits(written: str) -> bool:
        tokens = [*tokenizer.encode(written), end]
        return bool(guidance.matcher(guide).validate_tokens(tokens) == len(tokens))

    assert fits(call)
    assert fits('{"name": "Ann", "age": 42}')
    assert not fits("Ann is 42.")
    assert not fits(call.replace("Rome", "Rome, Paris and Athens"))
    assert not fits(f"Well: {call}")


def test_calls_that_look_like_any_json_are_refused_beside_a_form(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="set tool_choice to"):
        tool_guide("llama3", [TOOL], "auto", tokenizer, answer_rule="%json {}")
    assert tool_guide("llama3", [TOOL], "required", tokenizer, answer_rule="%json {}")


def test_every_finished_answer_is_a_call_or_has_the_form(client: openai.OpenAI) -> None:
    kinds = set()
    for seed in range(6):
        choice = client.chat.completions.create(**(ASK | {"seed": seed})).choices[0]
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            for call in choice.message.tool_calls or []:
                jsonschema.validate(json.loads(call.function.arguments), CITY)
        elif choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
    assert kinds & {"tool_calls", "stop"}


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    fields = ASK | {"temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == (whole.content or "")
    pieces = [call.function.arguments or "" for delta in deltas for call in delta.tool_calls or []]
    assert "".join(pieces) == "".join(call.function.arguments for call in whole.tool_calls or [])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_is_made_whatever_the_form(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(**ASK, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    jsonschema.validate(json.loads(answer.message.tool_calls[0].function.arguments), CITY)


def test_tools_that_may_not_be_called_leave_the_form(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, tool_choice="none").choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content or ""), PERSON)


def test_a_form_that_cannot_be_is_named_beside_tools(server: RunningServer) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "frob"}}}
    response = server.post("/v1/chat/completions", ASK | {"response_format": wrong})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "response_format"
