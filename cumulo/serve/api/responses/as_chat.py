"""From a responses request to the chat request that asks the same. Called by the endpoint.

Items are finer than messages: an assistant's thoughts, text and calls are items of their own, and one message.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from cumulo.errors import InvalidRequest
from cumulo.serve.api.openai.answer_form import check_form
from cumulo.serve.api.openai.chat import chat_prompt
from cumulo.serve.api.openai.conversation import as_chat_request, text_of
from cumulo.serve.api.openai.schemas import ChatRequest
from cumulo.serve.api.responses.request import (
    AllowedFunctions,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputMessage,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)
from cumulo.serve.errors import invalid
from cumulo.serve.service import Service

Entry = dict[str, Any]


def as_chat(body: ResponsesRequest, items: Sequence[InputItem]) -> ChatRequest:
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid('top_logprobs needs include: ["message.output_text.logprobs"]', "top_logprobs")
    messages: list[Entry] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields: Entry = {
        "model": body.model,
        "messages": messages + chat_messages(items),
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs or 0 if body.wants_logprobs else None,
        "response_format": _response_format(body.text.format if body.text is not None else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        **_tools(body),
    }
    return as_chat_request(fields, "input")


# -- messages ---------------------------------------------------------------------------------------------
def chat_messages(items: Sequence[InputItem]) -> list[Entry]:
    messages: list[Entry] = []
    called: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, InputMessage):
            if item.role != "assistant":
                messages.append({"role": item.role, "content": text_of(item.content)})
            else:
                _assistant(messages, "content", "tool_calls")["content"] = text_of(item.content)
        elif isinstance(item, ReasoningItem):
            entry = _assistant(messages, "content", "tool_calls")
            thoughts = "".join(part.text for part in item.content or item.summary or ())
            entry["reasoning_content"] = entry.get("reasoning_content", "") + thoughts
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
            called.add(item.call_id)
        else:
            messages.append(_result(item, index, called))
    for entry in messages:
        if "tool_calls" not in entry:
            entry.setdefault("content", "")  # an assistant that only thought
    return messages


def _assistant(messages: list[Entry], *closing: str) -> Entry:
    """The assistant's message that is being gathered; a new one if it has one of `closing` already."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in closing):
        messages.append({"role": "assistant"})
    return messages[-1]


def _result(item: FunctionCallOutputItem, index: int, called: set[str]) -> Entry:
    if item.call_id not in called:
        raise invalid(
            f"input[{index}] is the output of the call {item.call_id[:64]!r}, but no function_call with this "
            "call_id comes before it: send that item too, or the previous_response_id of the response that called",
            f"input[{index}].call_id",
            "invalid_value",
        )
    return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}


# -- the answer's form ------------------------------------------------------------------------------------
def _tools(body: ResponsesRequest) -> Entry:
    choice = body.tool_choice
    wanted: Any = choice
    if isinstance(choice, NamedFunction):
        wanted = _named(choice)
    elif isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(function) for function in choice.tools]}
        wanted = {"type": "allowed_tools", "allowed_tools": allowed}
    if not body.tools:
        return {"tool_choice": None if choice == "auto" else wanted}
    functions = [tool.model_dump(exclude={"type"}) for tool in body.tools]
    return {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": wanted,
        "parallel_tool_calls": body.parallel_tool_calls,
    }


def _named(function: NamedFunction) -> Entry:
    return {"type": "function", "function": {"name": function.name}}


def _response_format(wanted: TextFormat | None) -> Entry | None:
    """The wanted form as `response_format` of a chat completion."""
    if wanted is None:
        return None
    check_form(wanted, "text.format", "schema_")
    schema = {"name": wanted.name or "", "schema": wanted.schema_, "strict": wanted.strict}
    return {
        "type": wanted.type,
        "json_schema": schema if wanted.type == "json_schema" else None,
        "regex": wanted.regex,
        "grammar": wanted.grammar,
    }


async def fitted(service: Service, body: ResponsesRequest, items: Sequence[InputItem]) -> Sequence[InputItem]:
    """As many of the newest items as fit, with room for the answer; the last one at least."""
    max_context = service.info.max_context
    room_tokens = max_context - min(body.max_output_tokens or 1, max_context // 2)

    async def fits(dropped: int) -> bool:
        chat = await asyncio.to_thread(as_chat, body, without_oldest(items, dropped))
        try:
            _, _, tokens = await chat_prompt(service, chat)
        except InvalidRequest:  # too long to be tokenised at all
            return False
        return len(tokens) <= room_tokens

    if await fits(0):
        return items
    # How many to drop; the search takes log2 of the items, not all of them.
    too_few, enough = 0, len(items) - 1
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if await fits(middle):
            enough = middle
        else:
            too_few = middle
    return without_oldest(items, enough)


def without_oldest(items: Sequence[InputItem], dropped: int) -> list[InputItem]:
    """System messages stay, and no output stays without its call."""
    kept: list[InputItem] = []
    called: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, InputMessage) and item.role in ("system", "developer"):
            kept.append(item)
        elif index < dropped or (isinstance(item, FunctionCallOutputItem) and item.call_id not in called):
            continue
        else:
            kept.append(item)
            if isinstance(item, FunctionCallItem):
                called.add(item.call_id)
    return kept or [items[-1]]
