"""Guides that make a model call tools in its own format. Called by the chat endpoint for `tool_choice`.

`required` forces a call, markers included. `auto` lets the model write text, but a call that
it begins fits one of the tools; where the text must have a form, the answer is either that or calls. Every
tool's parameters are a JSON schema of their own in the grammar, so its `$ref`s stay valid.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cumulo.engine.decide.params import Guide
from cumulo.engine.guides.grammar import json_schema_text
from cumulo.errors import InvalidRequest
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.serve.formats import reasoning
from cumulo.serve.formats.tool_calls import (
    HERMES_CLOSE,
    HERMES_OPEN,
    MISTRAL_MARKER,
    ToolFormat,
    special_token,
)

MAX_PARALLEL_CALLS = 16
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


def tool_guide(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    choice: str,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
    reasoning_opened: bool = False,
    answer_rule: str | None = None,
) -> Guide | None:
    """The guide for `choice`: "auto" or "required".

    None where nothing can be enforced: Llama's bare JSON under "auto" looks like any JSON answer. With
    `reasoning_opened` the model may finish its thoughts before. `answer_rule`: what, in Lark, an answer without
    calls must fit; only "auto" leaves room for one.
    """
    if not tools:
        raise InvalidRequest("tool_choice asks for a tool call, but there are no tools; give tools")
    formed = choice == "auto" and answer_rule is not None
    if choice == "auto" and tool_format == "llama3":
        if formed:  # llguidance reads on without looking back, and both begin alike
            raise InvalidRequest(
                "this model's tool calls are plain JSON, which cannot be told from an answer of a given form: set "
                "tool_choice to required, a function or none"
            )
        return None
    writer = _Writer(tokenizer)
    most = MAX_PARALLEL_CALLS if parallel else 1
    calls = [writer.call(tool_format, index, tool["function"]) for index, tool in enumerate(tools)]
    writer.rule("call", " | ".join(calls))
    answer = _answer(writer, tool_format, "required" if formed else choice, most)
    if formed:
        writer.rule("formed", f"{answer_rule}")
        answer = f"({answer}) | formed"
    if reasoning_opened:
        answer = writer.after_thoughts(answer)
    return Guide("grammar", writer.grammar(answer))


def after_thoughts(rule: str, tokenizer: Tokenizer) -> Guide:
    """The rest of the thoughts, their end, and then what the rule says."""
    writer = _Writer(tokenizer)
    writer.rule("answer", rule)
    return Guide("grammar", writer.grammar(writer.after_thoughts("answer")))


def _answer(writer: "_Writer", tool_format: ToolFormat, choice: str, most: int) -> str:
    """The body of the grammar's first rule: text and calls in the order the format has them."""
    if tool_format == "hermes":
        if choice == "auto":
            writer.text_until("opening", HERMES_OPEN)
            writer.rule("closing", rf'"\n" {writer.marker(HERMES_CLOSE)}')
            return rf'(opening "\n" call closing){{0,{most}}} TEXT'
        writer.rule("marked", rf'{writer.marker(HERMES_OPEN)} "\n" call "\n" {writer.marker(HERMES_CLOSE)}')
        return _several("marked", r'"\n"', most)
    if tool_format == "llama3":
        return _several("call", '"; "', most)
    opening = marker = writer.marker(MISTRAL_MARKER)
    if choice == "auto":
        writer.text_until("opening", MISTRAL_MARKER)
        opening = "opening"
    if tool_format == "mistral":
        calls = f'{opening} " "? "[" {_several("call", json.dumps(", "), most)} "]"'
    else:
        calls = f"{opening} {_several('call', marker, most)}"
    return f"TEXT | {calls}" if choice == "auto" else calls


def _several(item: str, separator: str, most: int) -> str:
    return item if most == 1 else f"{item} ({separator} {item}){{0,{most - 1}}}"


class _Writer:
    """Writes a Lark grammar; markers that are special tokens of the model are named by their id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []

    def rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def marker(self, text: str) -> str:
        token = special_token(text, self._tokenizer)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def text_until(self, name: str, marker: str) -> None:
        """A rule for text up to the marker, included."""
        written = self.marker(marker)
        # A special token ends a text by itself; a written marker must end it where it first occurs.
        lazy = "" if written.startswith("<[") else "[lazy]"
        self.rule(f"{name}{lazy}", f"TEXT {written}")

    def after_thoughts(self, answer: str) -> str:
        self.text_until("thoughts", reasoning.CLOSE)
        return rf"thoughts /\s{{0,2}}/ ({answer})"

    def call(self, tool_format: ToolFormat, index: int, function: Mapping[str, Any]) -> str:
        """Rules for a call of this function; returns the rule's name."""
        name, key = function["name"], "parameters" if tool_format == "llama3" else "arguments"
        schema = function.get("parameters")
        schema = _NO_PARAMETERS if schema is None else schema
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"the parameters of the tool {name!r} must be a JSON schema, got {schema!r}")
        self.rule(f"arguments_{index}", f"%json {json_schema_text(dict(schema))}")
        if tool_format == "mistral_args":
            body = f"{json.dumps(name)} {self.marker('[ARGS]')} arguments_{index}"
        else:
            head = f'{{"name": {json.dumps(name)}, "{key}": '
            body = f'{json.dumps(head)} arguments_{index} "}}"'
        self.rule(f"call_{index}", body)
        return f"call_{index}"

    def grammar(self, answer: str) -> str:
        return "\n".join([f"start: {answer}", *self._rules, r"TEXT: /(.|\n)*/"])


def describe_tools(tools: Sequence[Tool]) -> str:
    """A system message for models whose chat template knows nothing of tools: they call in Hermes' format."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, described as JSON:\n{listed}\n\n"
        f"To call one, answer with its name and arguments between the tags:\n{HERMES_OPEN}\n"
        f'{{"name": "<function name>", "arguments": {{<arguments>}}}}\n{HERMES_CLOSE}'
    )
