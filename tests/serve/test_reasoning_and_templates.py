"""Models that think, and models whose chat template knows tools: the built-in model with such a template.

A grammar makes the built-in model think, so what is checked is the way from its tokens to the client.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from cumulo.engine.guides.guided import Guidance
from cumulo.serve.api.openai.answer_form import answer_form
from cumulo.serve.api.openai.conversation import conversation, template_tools
from cumulo.serve.api.openai.schemas import ChatRequest
from cumulo.serve.model_text import ModelText
from tests.serve.running_server import (
    MODEL,
    RunningServer,
    needs_built_in_model,
    quick_model,
    running_server,
)

pytestmark = [needs_built_in_model, pytest.mark.long]

THINKING = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.role == 'tool' %} ({{ message.name }} {{ message.tool_call_id }}){% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "How many?"}],
    "max_tokens": 60,
    "temperature": 0,
}
PONDER = {
    "type": "grammar",
    "grammar": r'start: "<think>\nWell, " /[a-z]{3,8}/ ".\n</think>\n\n" /[0-9]{2}/',
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    template.write_text(THINKING)
    with running_server(quick_model(), "--chat-template", str(template)) as running:
        yield running


def model_text(tmp_path: Path, template: str) -> ModelText:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    return ModelText.load(None, path)


def test_thoughts_are_apart_from_the_answer(thinker: RunningServer) -> None:
    message: Any = (
        thinker.client()
        .chat.completions.create(**ASK, extra_body={"response_format": PONDER})
        .choices[0]
        .message
    )
    assert message.content.isdecimal() and len(message.content) == 2
    assert message.reasoning_content.startswith("Well, ") and message.reasoning_content.endswith(".")


def test_streamed_thoughts_come_first_and_in_pieces(thinker: RunningServer) -> None:
    fields = ASK | {"extra_body": {"response_format": PONDER}}
    whole: Any = thinker.client().chat.completions.create(**fields).choices[0].message
    deltas: list[Any] = [
        chunk.choices[0].delta for chunk in thinker.client().chat.completions.create(**fields, stream=True)
    ]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    texts = [delta.content or "" for delta in deltas]
    assert "".join(thoughts) == whole.reasoning_content and "".join(texts) == whole.content
    last_thought = max(index for index, text in enumerate(thoughts) if text)
    assert sum(map(bool, thoughts)) > 2
    assert last_thought < min(index for index, text in enumerate(texts) if text)


def test_an_answer_without_thoughts_is_all_content(thinker: RunningServer) -> None:
    message = thinker.client().chat.completions.create(**ASK).choices[0].message
    assert message.content
    assert getattr(message, "reasoning_content", None) is None


def test_a_model_that_does_not_think_may_write_about_tags(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**ASK, extra_body={"response_format": PONDER}).choices[0].message
    assert (message.content or "").startswith("<think>\nWell, ")
    assert getattr(message, "reasoning_content", None) is None


def test_a_template_that_knows_tools_gets_them(thinker: RunningServer) -> None:
    fields = ASK | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"temperature": 1, "seed": 1, "max_tokens": 200}  # at 0 this model writes spaces without end
    answer = thinker.client().chat.completions.create(**fields)
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and calls is not None
    jsonschema.validate(json.loads(calls[0].function.arguments), TOOL["function"]["parameters"])
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "7"}
    fields = ASK | {"messages": [*ASK["messages"], answer.choices[0].message, result]}
    assert thinker.client().chat.completions.create(**fields).choices[0].message.content


# -- what reaches the template --------------------------------------------------------------------------------
HISTORY: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "21"},
]


def test_calls_and_results_reach_a_template_that_knows_them(tmp_path: Path) -> None:
    text = model_text(tmp_path, THINKING)
    assert text.formats.template_shows_tools and text.formats.thinks
    body = ChatRequest.model_validate({"model": "m", "messages": HISTORY, "tools": [TOOL]})
    tools = template_tools(body.tools or [])
    prompt = text.tokenizer.apply_chat_template(conversation(body.messages, text.formats, tools), True, tools)
    assert 'Tools:{"type": "function"' in prompt
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert "<|im_start|>user\none\ntwo<|im_end|>" in prompt
    assert (
        '<think>hm</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>' in prompt
    )
    assert "<|im_start|>tool\n21 (add c1)<|im_end|>" in prompt


def test_calls_and_results_are_written_out_for_a_template_that_does_not() -> None:
    text = ModelText.load(None)
    assert not text.formats.template_shows_tools and not text.formats.thinks
    body = ChatRequest.model_validate({"model": "m", "messages": HISTORY, "tools": [TOOL]})
    plain = conversation(body.messages, text.formats, template_tools(body.tools or []))
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert plain[0]["content"].startswith("Be brief.\n\n") and '"name": "add"' in plain[0]["content"]
    assert plain[2]["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert plain[3]["content"] == "<tool_response>\n21\n</tool_response>"
    assert all(set(message) <= {"role", "content", "reasoning_content"} for message in plain)


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}, "42"),
        ({"type": "json_object"}, '{"a": 1}'),
        ({"type": "regex", "regex": "[a-c]{2}/x"}, "ab/x"),
    ],
)
def test_a_form_holds_after_thoughts_that_the_template_opened(
    tmp_path: Path, form: dict[str, Any], answer: str
) -> None:
    text = model_text(tmp_path, THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}")
    body = ChatRequest.model_validate(ASK | {"response_format": form})
    prompt = text.tokenizer.apply_chat_template(conversation(body.messages, text.formats), True)
    wanted = answer_form(body, None, text, prompt)
    assert wanted.guide is not None
    eos = 2
    guidance = Guidance(text.tokenizer, text.tokenizer.vocab_size, (eos,))

    def fits(written: str) -> bool:
        tokens = [*text.tokenizer.encode(written), eos]
        return bool(guidance.matcher(wanted.guide).validate_tokens(tokens) == len(tokens))  # type: ignore[arg-type]

    assert fits(f"Let me see.\nYes.</think>\n\n{answer}")
    assert not fits(f"Let me see.</think>\n\nSo: {answer}")
    assert not fits(answer)
    reader = wanted.reader()
    pieces = reader.read(f"Let me see.\n</think>\n\n{answer}", last=True)
    assert [piece.text for piece in pieces] == ["Let me see.", answer]  # type: ignore[union-attr]
