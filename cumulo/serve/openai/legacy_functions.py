"""`functions` and `function_call`: OpenAI's form of tools before there were tools. Used by chat completions.

A request in that form is turned into one with tools, and the answer back into `message.function_call`; a message
of the role `function` is the result of the call before it.
"""

from collections.abc import Sequence
from typing import Any

from cumulo.serve.errors import invalid
from cumulo.serve.formats import Reasoning, Text, ToolCallStart
from cumulo.serve.openai.answer_reader import Piece, delta_of, message_of
from cumulo.serve.openai.schemas import ChatRequest, Message
from cumulo.serve.openai.schemas_form import NamedTool, Tool, ToolCall


def as_tools(body: ChatRequest) -> ChatRequest:
    """The same request with tools; itself if nothing in it has the older form."""
    changes: dict[str, Any] = {}
    if body.functions is not None or body.function_call is not None:
        changes |= _tools(body)
    messages = with_tool_calls(body.messages)
    if messages is not body.messages:
        changes["messages"] = messages
    return body.model_copy(update=changes) if changes else body


def _tools(body: ChatRequest) -> dict[str, Any]:
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        if getattr(body, name) is not None:
            raise invalid(f"{name} and functions exclude each other: write the functions as tools", name)
    functions, choice = body.functions or [], body.function_call
    if not functions:
        if choice is not None and choice != "none":
            raise invalid("function_call needs functions; give functions or leave it out", "function_call")
        return {}
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"functions has two functions named {name!r}", f"functions[{index}].name")
    if choice is None or isinstance(choice, str):
        wanted: Any = choice
    elif choice.name in names:
        wanted = NamedTool.model_construct(type="function", function=choice)
    else:
        listing = ", ".join(names)
        raise invalid(
            f"function_call names {choice.name[:64]!r}, which is not among the functions: {listing}",
            "function_call",
        )
    tools = [Tool.model_construct(type="function", function=function) for function in functions]
    return {"tools": tools, "tool_choice": wanted, "parallel_tool_calls": False}


def with_tool_calls(messages: list[Message]) -> list[Message]:
    """Messages with tool calls in place of function calls; the same list if there are none. Calls get ids of their
    own, and a result belongs to the last call before it."""
    if not any(message.function_call is not None or message.role == "function" for message in messages):
        return messages
    changed: list[Message] = []
    last_id = "call_0"
    for index, message in enumerate(messages):
        update: dict[str, Any] = {}
        if message.function_call is not None:
            place = f"messages[{index}].function_call"
            if message.role != "assistant":
                raise invalid(
                    f"'{place}' belongs to messages of the role assistant, not {message.role}", place
                )
            if message.tool_calls:
                raise invalid(f"'{place}' and tool_calls exclude each other", place)
            last_id = f"call_{index}"
            call = ToolCall.model_construct(id=last_id, type="function", function=message.function_call)
            update = {"function_call": None, "tool_calls": [call]}
        elif message.role == "function":
            if message.name is None:
                place = f"messages[{index}].name"
                raise invalid(f"'{place}' is missing", place, "missing_required_parameter")
            update = {"role": "tool", "tool_call_id": last_id}
        changed.append(message.model_copy(update=update) if update else message)
    return changed


def legacy_message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The assistant's message, with its call in the older form."""
    message = message_of(pieces)
    for call in message.pop("tool_calls", ())[:1]:
        message["function_call"] = call["function"]
    return message


def legacy_delta(piece: Piece) -> dict[str, Any]:
    """The same, as a streamed chunk says it."""
    if isinstance(piece, Text | Reasoning):
        return delta_of(piece)
    if isinstance(piece, ToolCallStart):
        return {"function_call": {"name": piece.name, "arguments": ""}}
    return {"function_call": {"arguments": piece.fragment}}
