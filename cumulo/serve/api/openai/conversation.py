"""From a request's messages and tools to what chat templates expect. Used by /v1/chat/completions and /tokenize.

Templates of models that know tools get them, and earlier calls, as transformers would pass them. For other models a
system message describes the tools, and calls and results are written out in Hermes' form.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import ValidationError

from cumulo.serve.api.openai.asked_form import Tool, ToolCall
from cumulo.serve.api.openai.schemas import ChatRequest, Message
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.formats.forcing import describe_tools
from cumulo.serve.formats.tool_calls import HERMES_CLOSE, HERMES_OPEN
from cumulo.serve.model_text import ModelFormats, ModelText

# What the request says in fields of its own, and what a template's functions are called.
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "reasoning_effort")
_NOT_A_VARIABLE = (
    "self", "documents", "chat_template", "tokenize", "raise_exception", "strftime_now", "range", "namespace",
)  # fmt: skip
_NO_THOUGHTS = ("none", "minimal")


def template_variables(
    given: Mapping[str, Any] | None, reasoning_effort: str | None, text: ModelText
) -> dict[str, Any]:
    """Raises ApiError for names that are not free: special tokens, too, are the model's and not the caller's."""
    variables = dict(given or {})
    for name in variables:
        param = f"chat_template_kwargs.{name[:64]}"
        if name in _RESERVED and not (name == "reasoning_effort" and reasoning_effort is None):
            raise invalid(f"chat_template_kwargs cannot set {name}: use the field {name}", param)
        if name in _NOT_A_VARIABLE or name in text.tokenizer.special_texts or not name.isidentifier():
            raise invalid(
                f"chat_template_kwargs cannot set {name[:64]!r}: it is no free variable of a chat template",
                param,
            )
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
        if reasoning_effort in _NO_THOUGHTS and _names(text, "enable_thinking"):
            variables.setdefault("enable_thinking", False)
    return variables


def _names(text: ModelText, variable: str) -> bool:
    template = text.tokenizer.chat_template
    return template is not None and re.search(rf"\b{variable}\b", template.source) is not None


TemplateMessage = dict[str, Any]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as transformers passes them; a template may rely on every part being there."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def conversation(
    messages: Sequence[Message], formats: ModelFormats, tools: Sequence[dict[str, Any]] = ()
) -> list[TemplateMessage]:
    """One text per message, `system` for what newer models call developer, and `tools` described if the
    template cannot do it."""
    plain: list[TemplateMessage] = []
    called: dict[str, str] = {}  # names by call id, for the results that follow
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        _check(message, place)
        entry = _entry(message, place)
        for call in message.tool_calls or ():
            called[call.id] = call.function.name
        if message.role == "tool":
            entry["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                entry.setdefault("name", called[message.tool_call_id])
        plain.append(entry if formats.template_shows_tools else _written_out(entry))
    if tools and not formats.template_shows_tools:
        described = describe_tools(tools)
        if plain[0]["role"] == "system":
            plain[0]["content"] += f"\n\n{described}"
        else:
            plain.insert(0, {"role": "system", "content": described})
    return plain


def _check(message: Message, place: str) -> None:
    """Refuse fields that do not belong to the message's role."""
    if message.content is None and not message.tool_calls:
        raise _missing(f"{place}.content")
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{place}.tool_call_id")
    for name, role in (
        ("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool"),
    ):  # fmt: skip
        if getattr(message, name) and message.role != role:
            param = f"{place}.{name}"
            raise invalid(
                f"'{param}' belongs to messages of the role {role}, not {message.role}",
                param,
                "invalid_value",
            )


def _missing(param: str) -> ApiError:
    return invalid(f"'{param}' is missing", param, "missing_required_parameter")


class HasText(Protocol):
    text: str


def text_of(content: str | Sequence[HasText] | None) -> str:
    """The text of a message, which may be given in parts."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def as_chat_request(fields: Mapping[str, Any], param: str) -> ChatRequest:
    """The chat request that another API's request amounts to; `param` is the field of that which holds messages."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:  # what chats bound more tightly than others do
        raise invalid(error.errors()[0]["msg"], param, "invalid_value") from None


def check_continued(messages: Sequence[Message], add_generation_prompt: bool | None) -> None:
    """Refuse a conversation that `continue_final_message` cannot continue."""
    last, param = messages[-1], "continue_final_message"
    if add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other: one continues the last message, "
            "the other begins a new one; leave one of them out",
            param,
        )
    if last.role != "assistant" or last.tool_calls:
        kind = "an assistant that calls tools" if last.role == "assistant" else last.role
        raise invalid(
            f"continue_final_message continues an assistant's text, and the last message is of the role {kind}: "
            "add an assistant message with the beginning of the answer, or leave continue_final_message out",
            param,
        )


def _entry(message: Message, place: str) -> TemplateMessage:
    entry: TemplateMessage = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content),
    }
    if message.name is not None:
        entry["name"] = message.name
    if message.reasoning_content:
        entry["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        entry["tool_calls"] = [
            _call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return entry


def _call(call: ToolCall, place: str) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they need the object, not its text."""
    param = f"{place}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"'{param}' must be the text of a JSON object", param, "invalid_value")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _written_out(entry: TemplateMessage) -> TemplateMessage:
    """Calls and results as text, for templates that only know contents."""
    if entry["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{entry['content']}\n</tool_response>"}
    calls = entry.pop("tool_calls", ())
    lines = [entry["content"]] if entry["content"] else []
    lines += [
        f"{HERMES_OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{HERMES_CLOSE}" for call in calls
    ]
    return {**entry, "content": "\n".join(lines)}
