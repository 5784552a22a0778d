"""What a chat request demands of its answer: the guide that enforces it and the AnswerReader that takes it apart.

`tool_use` and `check_form` refuse what does not go together; `answer_form` needs the prompt, because its end
tells whether the model begins with its thoughts.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cumulo.engine.decide.params import Guide
from cumulo.engine.guides.grammar import json_schema_text
from cumulo.errors import InvalidRequest
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.serve.api.openai.asked_form import AllowedTools, NamedTool, ResponseFormat, Tool, literal
from cumulo.serve.api.openai.conversation import template_tools, text_of
from cumulo.serve.api.openai.schemas import ChatRequest, CompletionRequest
from cumulo.serve.errors import invalid
from cumulo.serve.formats.events import Event, Text, ToolCallArguments, ToolCallStart
from cumulo.serve.formats.forcing import after_thoughts, tool_guide
from cumulo.serve.formats.reasoning import CLOSE, OPEN, Reasoning, ReasoningParser, opens_reasoning
from cumulo.serve.formats.tool_calls import ToolCallParser
from cumulo.serve.model_text import ModelText

Piece = Reasoning | Event


class AnswerReader:
    """Takes one answer apart into thoughts, text and tool calls. The whole answer and the streamed one are read by
    the same parsers, so they never differ."""

    def __init__(
        self, thoughts: ReasoningParser | None, calls: ToolCallParser | None, *, parallel: bool = True
    ) -> None:
        """`parallel` False: only the first call counts, whatever the model writes."""
        self._thoughts, self._calls, self._parallel = thoughts, calls, parallel
        self.called = False

    def read(self, text: str, last: bool) -> list[Piece]:
        """What this next piece of the answer adds; `last`: nothing follows."""
        parts: list[Reasoning | Text] = [Text(text)] if text else []
        if self._thoughts is not None:
            parts = self._thoughts.push(text) + (self._thoughts.finish() if last else [])
        pieces: list[Piece] = []
        for part in parts:
            pieces += self._calls.push(part.text) if self._calls and isinstance(part, Text) else [part]
        if self._calls is not None and last:
            pieces += self._calls.finish()
        if not self._parallel:  # one call at most
            calls = (ToolCallStart, ToolCallArguments)
            pieces = [piece for piece in pieces if not (isinstance(piece, calls) and piece.index > 0)]
        self.called = self.called or any(isinstance(piece, ToolCallStart) for piece in pieces)
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.called else reason


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The assistant's message that a whole answer makes."""
    text, thoughts = "", ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Text):
            text += piece.text
        elif isinstance(piece, Reasoning):
            thoughts += piece.text
        elif isinstance(piece, ToolCallStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.fragment
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def delta_of(piece: Piece) -> dict[str, Any]:
    """What a piece of an answer adds, as a streamed chunk says it."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    if isinstance(piece, ToolCallStart):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.fragment}}]}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request whose answer may call them."""

    tools: list[Tool]  # that may be called
    choice: Literal["auto", "required"]
    parallel: bool
    shown: list[dict[str, Any]]  # what the model is told of


@dataclass(frozen=True, slots=True)
class AnswerForm:
    reader: Callable[[], AnswerReader]  # makes the reader of one answer
    guide: Guide | None = None
    guide_param: str | None = None  # the field to name when the guide is refused
    show_special: bool = False


def tool_use(body: ChatRequest) -> ToolUse | None:
    """Which tools the answer may call; None: it is to call none. Refuses contradictions."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice is not None and choice != "none":
            raise invalid("tool_choice needs tools; give tools or leave it out", "tool_choice")
        if body.parallel_tool_calls is not None:
            raise invalid("parallel_tool_calls needs tools; leave it out", "parallel_tool_calls")
        return None
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools has two functions named {name!r}", f"tools[{index}].function.name")
    if choice == "none":
        return None
    named = _named(choice)
    for name in named:
        if name not in names:
            raise invalid(
                f"tool_choice names {name[:64]!r}, which is not among the tools: {', '.join(names)}",
                "tool_choice",
            )
    if body.response_format is not None and body.response_format.type == "grammar":
        raise invalid(
            "a grammar and tools that may be called exclude each other: use json_schema or regex, or set "
            "tool_choice to none",
            "response_format",
        )
    allowed = [tool for tool in tools if not named or tool.function.name in named]
    shown, parallel = template_tools(tools), body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        return ToolUse(allowed, "required", False, shown)  # one call, of this tool
    if isinstance(choice, AllowedTools):
        return ToolUse(allowed, choice.allowed_tools.mode, parallel, shown)
    return ToolUse(allowed, choice or "auto", parallel, shown)


def _named(choice: object) -> list[str]:
    """The functions that a tool_choice names."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedTools):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return []


def check_form(wanted: Any, place: str = "response_format", schema_field: str = "json_schema") -> None:
    """The field that a form of the answer needs is there, and no other. `place`: what the request calls the form;
    `schema_field`: and the field of its schema there."""
    if wanted is None:
        return
    for kind, name in (("json_schema", schema_field), ("regex", "regex"), ("grammar", "grammar")):
        given, param = getattr(wanted, name) is not None, f"{place}.{name.rstrip('_')}"
        if given and wanted.type != kind:
            raise invalid(f"'{param}' needs type {kind}, not {wanted.type}", param, "invalid_value")
        if not given and wanted.type == kind:
            raise invalid(f"'{param}' is missing", param, "missing_required_parameter")


def answer_form(body: ChatRequest, use: ToolUse | None, text: ModelText, prompt: str) -> AnswerForm:
    """Make the form of an answer; raises ApiError where it cannot be."""
    try:
        return _answer_form(body, use, text, prompt)
    except (RecursionError, InvalidRequest) as error:
        formed = body.response_format is not None and body.response_format.type != "text"
        param = "response_format" if use is None or formed else "tools"
        too_deep = f"a schema in {param} is nested too deeply"
        raise invalid(too_deep if isinstance(error, RecursionError) else str(error), param) from None


def _answer_form(body: ChatRequest, use: ToolUse | None, text: ModelText, prompt: str) -> AnswerForm:
    formats = text.formats
    opened = formats.thinks and (opens_reasoning(prompt) or _continues_thoughts(body))
    show_special = formats.thinks and formats.thought_markers_special

    def reader() -> AnswerReader:
        thoughts = ReasoningParser(opened=opened) if formats.thinks else None
        if use is None:
            return AnswerReader(thoughts, None)
        names = [tool.function.name for tool in use.tools]
        return AnswerReader(thoughts, ToolCallParser(formats.tools, names), parallel=use.parallel)

    if use is None:
        guide = guide_of(body, text.tokenizer, opened)
        return AnswerForm(reader, guide, "bad_words" if body.bad_words else "response_format", show_special)
    if body.bad_words:
        raise invalid(f"bad_words and {_EXCLUDED} tools that may be called", "bad_words")
    form_rule = _rule_of(body.response_format)
    guide = tool_guide(
        formats.tools,
        [_enforced(tool) for tool in use.tools],
        use.choice,
        text.tokenizer,
        parallel=use.parallel,
        reasoning_opened=opened,
        answer_rule=form_rule,
    )
    param = "tools" if form_rule is None else "response_format"
    return AnswerForm(reader, guide, param, show_special or formats.tool_markers_special)


def _continues_thoughts(body: ChatRequest) -> bool:
    """Whether the message that the answer continues ends inside its thoughts."""
    if not body.continue_final_message:
        return False
    text = text_of(body.messages[-1].content)
    return text.rfind(OPEN) > text.rfind(CLOSE)


def _enforced(tool: Tool) -> dict[str, Any]:
    schema = tool.function.parameters
    if schema is not None and not tool.function.strict:
        schema = _lenient(schema)
    return {"type": "function", "function": {"name": tool.function.name, "parameters": schema}}


def _lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """What cannot be enforced is passed over, and the rest still holds."""
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {"lenient": True, **(own if isinstance(own, dict) else {})}}


# -- response_format --------------------------------------------------------------------------------------
_EXCLUDED = "exclude each other: one grammar steers an answer. Leave out bad_words or the"


def guide_of(body: ChatRequest | CompletionRequest, tokenizer: Tokenizer, opened: bool) -> Guide | None:
    """The guide of an answer without tools. `opened`: the model begins with its thoughts."""
    wanted = body.response_format
    if body.bad_words:
        if wanted is not None and wanted.type != "text":
            raise invalid(f"bad_words and response_format {_EXCLUDED} response_format", "bad_words")
        return Guide("grammar", _without_words(body.bad_words))
    if wanted is None or wanted.type == "text":
        return None
    if opened:
        if wanted.type == "grammar":
            raise invalid(
                "this model begins every answer with its thoughts, which a grammar of the answer does not cover: "
                "use json_schema or regex",
                "response_format",
            )
        rule = _rule_of(wanted)
        assert rule is not None
        return after_thoughts(rule, tokenizer)
    if wanted.type in ("regex", "grammar"):
        return Guide(wanted.type, _source_of(wanted))
    return Guide("json_schema", json.dumps(_schema_of(wanted)))


def _without_words(words: list[str]) -> str:
    """Any text in which none of these stands as a whole word: with no ASCII letter, digit or _ on either side."""
    either, edge = "|".join(map(literal, words)), "[^A-Za-z0-9_]"
    return f"start: TEXT\nTEXT: /(?s:.*)/ & ~/((?s:.*){edge})?({either})({edge}(?s:.*))?/"


def _rule_of(wanted: ResponseFormat | None) -> str | None:
    """The form as the body of a rule in a larger grammar; None: any text. Not for grammars, which have their own
    rules."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "regex":
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(_source_of(wanted), 'd')}/"
    return f"%json {json_schema_text(_schema_of(wanted))}"


def _source_of(wanted: ResponseFormat) -> str:
    source = wanted.regex if wanted.type == "regex" else wanted.grammar
    assert source is not None  # check_form
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise invalid(
            f"response_format.{wanted.type} holds a lone surrogate (character {error.start})",
            f"response_format.{wanted.type}",
        ) from None
    return source


def _schema_of(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        return {"type": "object"}
    schema = wanted.json_schema.schema_
    return _lenient(schema) if wanted.json_schema.strict is False else schema
