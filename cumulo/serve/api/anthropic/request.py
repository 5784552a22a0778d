"""The request bodies of /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them, and the chat
request that asks the same as one of them.

A user's message may hold tool results, which are messages of their own in chats; an assistant's thoughts, text and
calls are one message there. An answer that is to continue the last message stays a continuation.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from cumulo.serve.api.openai.asked_form import (
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    Description,
    FunctionName,
    Schema,
    StopString,
)
from cumulo.serve.api.openai.conversation import as_chat_request, text_of
from cumulo.serve.api.openai.schemas import MAX_MESSAGES, MAX_PARTS, ChatRequest, Label, Temperature, TopP
from cumulo.serve.bodies.strict import Strict, kind_of, of_type
from cumulo.serve.errors import NO_THREADS, invalid

CacheControl = Annotated[
    dict[str, Any], Field(description="Accepted for compatibility: every prompt is cached by its content.")
]
ToolUseId = Annotated[str, StringConstraints(min_length=1, max_length=512)]


# -- what messages hold -----------------------------------------------------------------------------------
class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, description="Of an earlier answer; not used.")
    parsed_output: Any = Field(None, description="What Anthropic's client made of an answer; not used.")
    ignores_unknown: ClassVar[bool] = True


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Not checked: thoughts are taken back as they are.")
    ignores_unknown: ClassVar[bool] = True


class RedactedThinkingBlock(Strict):
    type: Literal["redacted_thinking"]
    data: str | None = Field(None, description="Not used: this server cannot read it.")
    ignores_unknown: ClassVar[bool] = True


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: ToolUseId
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = Field(None, description="Not used.")
    toolset_name: Label | None = Field(None, description="Not used.")
    ignores_unknown: ClassVar[bool] = True


PlainBlock = Annotated[
    TextBlock, of_type("text", words="this server reads text only; '{kind}' blocks are not supported")
]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: ToolUseId
    content: str | Annotated[list[PlainBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = Field(None, description="true: the model is told that the tool failed.")
    cache_control: CacheControl | None = None
    toolset_name: Label | None = Field(None, description="Not used.")
    ignores_unknown: ClassVar[bool] = True


# The tags have a dash, by which errors.py knows them as no part of a field's name.
Block = Annotated[
    Annotated[TextBlock, Tag("block-text")]
    | Annotated[ThinkingBlock, Tag("block-thinking")]
    | Annotated[RedactedThinkingBlock, Tag("block-redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("block-tool_use")]
    | Annotated[ToolResultBlock, Tag("block-tool_result")],
    Discriminator(lambda value: f"block-{kind_of(value) or 'text'}"),
    of_type(
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        words="this server reads text only; '{kind}' blocks are not supported, only those of type {known}",
    ),
]


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS)]
    ignores_unknown: ClassVar[bool] = True


# -- tools and the form of the answer ---------------------------------------------------------------------
class CustomTool(Strict):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: Description | None = None
    input_schema: Schema
    strict: bool | None = Field(
        None, description="true: refuse keywords of the schema that cannot be enforced."
    )
    cache_control: CacheControl | None = None
    ignores_unknown: ClassVar[bool] = True
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],), "defer_loading": (False,), "eager_input_streaming": (False, True),
    }  # fmt: skip


CustomTools = Annotated[
    list[
        Annotated[
            CustomTool,
            of_type(
                "custom",
                words="this server has no '{kind}' tool: it calls tools that you describe with an input_schema and "
                "you run",
            ),
        ]
    ],
    Field(max_length=MAX_TOOLS),
]


class CustomToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call per answer.")


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=1 << 31, description="Not enforced; see max_tokens.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thinking blocks come without their text. Thoughts are never summarised."
    )


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Strict):
    format: JsonFormat | None = Field(None, description="The schema that the answer must fit.")
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A variable of the model's chat template, as reasoning_effort of chat completions."
    )


class Metadata(Strict):
    user_id: Label | None = Field(None, description="Accepted for compatibility; not used.")


# -- the requests -----------------------------------------------------------------------------------------
class CountTokensRequest(Strict):
    """What makes the prompt."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[PlainBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: CustomTools | None = Field(None, description="What the model may call.")
    tool_choice: CustomToolChoice | None = Field(None, description="Left out: auto if there are tools.")
    thinking: Thinking | None = Field(
        None, description="enabled and disabled set enable_thinking for the model's chat template."
    )
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older name of output_config.format.")
    cache_control: CacheControl | None = None
    thread: Any = Field(
        None, description="Refused: the server keeps no threads. Clients then send all messages."
    )
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (), "context_management": (), "diagnostics": (), "inference_geo": (), "mcp_servers": ([],),
        "speed": ("standard",),
    }  # fmt: skip
    ignored = frozenset(
        ("billing_policy", "compaction", "fallback_credit_token", "fallbacks", "user_profile_id", "workspace_id")
    )  # fmt: skip


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1, le=1 << 31)
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = Field(False, description="Send the answer as events while it is made.")
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int | None = Field(None, ge=0, le=1 << 31)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        None, description="Accepted for compatibility; not used."
    )


# -- as a chat request ------------------------------------------------------------------------------------
Entry = dict[str, Any]
_TOOL_USE = "toolu_"  # how ids of calls begin in this API
_BELONGS: dict[type, str] = {
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
}


def as_chat(body: CountTokensRequest) -> ChatRequest:
    if body.thread is not None:
        raise invalid("thread: this server keeps no threads; send all messages", "thread", NO_THREADS)
    config = body.output_config
    wanted = config.format if config is not None and config.format is not None else body.output_format
    form = {"name": "output", "schema": wanted.schema_} if wanted is not None else None
    messages = _messages(body)
    fields: Entry = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": messages[-1]["role"] == "assistant",
        "response_format": {"type": "json_schema", "json_schema": form} if form is not None else None,
        "reasoning_effort": config.effort if config is not None else None,
        "chat_template_kwargs": _thinking(body),
        **_tools(body),
    }
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return as_chat_request(fields, "messages")


def _thinking(body: CountTokensRequest) -> Entry | None:
    """The variable by which templates of models that can do both know it; others do not look."""
    if body.thinking is None or body.thinking.type not in ("enabled", "disabled"):
        return None
    return {"enable_thinking": body.thinking.type == "enabled"}


def tool_use_id(call_id: str) -> str:
    """A call's id as this API spells it. What follows the prefix is the model's own: some templates check it."""
    return f"{_TOOL_USE}{call_id.removeprefix('call_')}"


# -- messages ---------------------------------------------------------------------------------------------
def _messages(body: CountTokensRequest) -> list[Entry]:
    messages: list[Entry] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system)})
    called: set[str] = set()
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        if isinstance(message.content, str):
            _add_text(messages, message.role, message.content)
        else:
            _add_blocks(messages, message, place, called)
    last = messages[-1] if messages else {"role": "system"}
    if last["role"] == "assistant" and "tool_calls" in last:
        raise invalid(
            "the last message calls tools: send their results, as tool_result blocks of a user's message",
            "messages",
        )
    if last["role"] == "system":
        raise invalid("the messages hold nothing to answer; send a user's message with text", "messages")
    return messages


def _add_blocks(messages: list[Entry], message: Turn, place: str, called: set[str]) -> None:
    assert not isinstance(message.content, str)
    for index, block in enumerate(message.content):
        role = _BELONGS.get(type(block), message.role)
        if role != message.role:
            param = f"{place}.content[{index}]"
            kind = block.type
            raise invalid(
                f"'{param}': {kind} blocks belong to messages of the role {role}, not {message.role}", param
            )
        if isinstance(block, TextBlock):
            _add_text(messages, message.role, block.text, joined_by="\n" if index else "\n\n")
        elif isinstance(block, ToolUseBlock):
            call_id = block.id.removeprefix(_TOOL_USE)
            called.add(call_id)
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append({"id": call_id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            entry = _assistant(messages)
            entry["reasoning_content"] = entry.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolResultBlock):
            messages.append(_result(block, f"{place}.content[{index}]", called))


def _add_text(messages: list[Entry], role: str, text: str, joined_by: str = "\n\n") -> None:
    """Texts of one role that follow each other are one turn; templates may insist on taking turns."""
    last = messages[-1] if messages else None
    if role == "system" or last is None or last["role"] != role or "tool_calls" in last:
        messages.append({"role": role, "content": text})
    else:
        last["content"] = f"{last['content']}{joined_by}{text}" if last.get("content") else text


def _assistant(messages: list[Entry]) -> Entry:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _result(block: ToolResultBlock, place: str, called: set[str]) -> Entry:
    call_id = block.tool_use_id.removeprefix(_TOOL_USE)
    if call_id not in called:
        raise invalid(
            f"'{place}.tool_use_id': no tool_use block with the id {block.tool_use_id[:64]!r} comes before it",
            f"{place}.tool_use_id",
        )
    text = text_of(block.content or "")
    # Chats have no field for it, so it is said.
    return {"role": "tool", "tool_call_id": call_id, "content": f"Error: {text}" if block.is_error else text}


# -- tools ------------------------------------------------------------------------------------------------
def _tools(body: CountTokensRequest) -> Entry:
    choice = _choice(body.tool_choice)
    if not body.tools:
        return {"tool_choice": None if choice == "auto" else choice}
    functions = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        for tool in body.tools
    ]
    single = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    return {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        "parallel_tool_calls": False if single else None,
    }


def _choice(wanted: CustomToolChoice | None) -> Any:
    if wanted is None:
        return None
    if (wanted.name is None) == (wanted.type == "tool"):
        problem = "is missing" if wanted.name is None else f"needs type tool, not {wanted.type}"
        raise invalid(f"'tool_choice.name' {problem}", "tool_choice.name")
    if wanted.type == "tool":
        return {"type": "function", "function": {"name": wanted.name}}
    return {"any": "required"}.get(wanted.type, wanted.type)
