"""The request body of /v1/responses, as OpenAI's clients send it: items, function tools, the answer's form; and the
chat request that asks the same.

Items are finer than messages: an assistant's thoughts, text and calls are items of their own, and one message.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, TypeAdapter, model_validator

from cumulo.serve.api.openai.answer_form import check_form
from cumulo.serve.api.openai.asked_form import MAX_TOOLS, AnswerFormat, CalledFunction, Function, SchemaFields
from cumulo.serve.api.openai.conversation import as_chat_request, text_of
from cumulo.serve.api.openai.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    TEXT_ONLY,
    ChatRequest,
    Label,
    ReasoningEffort,
    Temperature,
    TopP,
)
from cumulo.serve.bodies.strict import Strict, kind_of, of_type
from cumulo.serve.errors import invalid

_OF_EARLIER = "Of an earlier answer; not used."


# -- the form of the answer -------------------------------------------------------------------------------
class TextFormat(AnswerFormat, SchemaFields):
    """The form of the answer, with the schema's fields beside its type."""

    name: Annotated[str, StringConstraints(max_length=256)] | None = Field(None, description="Not used.")


class TextOptions(Strict):
    format: TextFormat | None = None
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}


class ReasoningOptions(Strict):
    effort: ReasoningEffort | None = Field(None, description="As reasoning_effort of chat completions.")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "summary": ("auto",), "generate_summary": ("auto",), "context": ("auto",), "mode": ("standard",),
    }  # fmt: skip


# -- input items ------------------------------------------------------------------------------------------
class InputText(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, description=_OF_EARLIER)
    logprobs: list[Any] | None = Field(None, description=_OF_EARLIER)
    parsed: Any = Field(None, description="What OpenAI's client made of an earlier answer; not used.")
    prompt_cache_breakpoint: dict[str, Any] | None = Field(
        None, description="Accepted for compatibility: every prompt is cached by its content."
    )
    ignores_unknown: ClassVar[bool] = True


InputParts = Annotated[
    list[Annotated[InputText, of_type("input_text", "output_text", words=TEXT_ONLY)]],
    Field(max_length=MAX_PARTS),
]


class EarlierItem(Strict):
    """What every item of an earlier answer has."""

    id: Label | None = Field(None, description=_OF_EARLIER)
    status: Label | None = Field(None, description=_OF_EARLIER)
    ignores_unknown: ClassVar[bool] = True


class InputMessage(EarlierItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[InputParts, Field(min_length=1)]
    phase: Label | None = Field(None, description=_OF_EARLIER)

    @model_validator(mode="after")
    def _in_parts(self) -> "InputMessage":
        """A text is one part, as the API gives it back."""
        if isinstance(self.content, str):
            part: dict[str, Any] = {"type": "input_text", "text": self.content}
            if self.role == "assistant":
                part |= {"type": "output_text", "annotations": []}
            self.content = [InputText.model_validate(part)]
        return self


class FunctionCallItem(EarlierItem, CalledFunction):
    type: Literal["function_call"]
    call_id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    parsed_arguments: Any = Field(None, description="What OpenAI's client made of the arguments; not used.")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "async": (False,), "caller": ({"type": "direct"},), "namespace": (),
    }  # fmt: skip


class FunctionCallOutputItem(EarlierItem):
    type: Literal["function_call_output"]
    call_id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    output: str | InputParts
    name: Label | None = Field(None, description="Not used: the call of this call_id says it.")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},), "namespace": ()}


class ThoughtText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str
    ignores_unknown: ClassVar[bool] = True


class ReasoningItem(EarlierItem):
    type: Literal["reasoning"]
    summary: list[ThoughtText] | None = Field(None, description="Used where there is no content.")
    content: list[ThoughtText] | None = None
    encrypted_content: str | None = Field(None, description="Not used: this server encrypts nothing.")


# The tags have a dash, by which errors.py knows them as no part of a field's name.
InputItem = Annotated[
    Annotated[InputMessage, Tag("item-message")]
    | Annotated[FunctionCallItem, Tag("item-function_call")]
    | Annotated[FunctionCallOutputItem, Tag("item-function_call_output")]
    | Annotated[ReasoningItem, Tag("item-reasoning")],
    Discriminator(lambda value: f"item-{kind_of(value, 'message')}"),
    of_type(
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        words="this server reads items of type {known}, not '{kind}'",
    ),
]
input_items: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])  # to read what was stored


# -- tools ------------------------------------------------------------------------------------------------
class FunctionTool(Function):
    type: Literal["function"]
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,), "output_schema": (),
    }  # fmt: skip


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class AllowedFunctions(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


_NO_SUCH_TOOL = (
    "this server has no '{kind}' tool: it calls functions that you describe (type 'function') and you run"
)
FunctionTools = Annotated[
    list[Annotated[FunctionTool, of_type("function", words=_NO_SUCH_TOOL)]], Field(max_length=MAX_TOOLS)
]


def _choice_tag(value: Any) -> str:
    if isinstance(value, str):
        return "choice-word"
    return "choice-allowed" if kind_of(value) == "allowed_tools" else "choice-function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("choice-word")]
    | Annotated[NamedFunction, Tag("choice-function")]
    | Annotated[AllowedFunctions, Tag("choice-allowed")],
    Discriminator(_choice_tag),
    of_type("function", "allowed_tools", words=_NO_SUCH_TOOL),
]


# -- the request ------------------------------------------------------------------------------------------
class ResponsesRequest(Strict):
    model: str = Field(description="The served model's name, as /v1/models lists it.")
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = Field(None, description="A system message before everything else.")
    previous_response_id: Label | None = Field(
        None, description="Continue this stored response; its instructions are not taken over."
    )
    store: bool | None = Field(None, description="false: do not keep the response. Left out: keep it.")
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="Log-probabilities; encrypted reasoning has no effect, reasoning is given in clear."
    )
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Of this many alternatives.")
    stream: bool | None = Field(False, description="Send the answer as events while it is made.")
    text: TextOptions | None = Field(None, description="The form of the answer.")
    tools: FunctionTools | None = Field(None, description="Functions the model may call.")
    tool_choice: ToolChoice | None = Field(
        None, description="Whether it may, must, or must call this one. Left out: auto if there are tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call per answer.")
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: drop the oldest items if the input is longer than the context."
    )
    metadata: Annotated[dict[str, Label], Field(max_length=64)] | None = Field(
        None, description="Given back with the answer."
    )
    user: Label | None = Field(None, description="Accepted for compatibility; not used.")
    safety_identifier: Label | None = Field(None, description="Accepted for compatibility; not used.")
    prompt_cache_key: Label | None = Field(None, description="Accepted for compatibility; not used.")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (), "background": (False,), "context_management": (), "conversation": (), "image": (),
        "max_tool_calls": (), "moderation": (), "prompt": (), "prompt_cache_options": (),
        "prompt_cache_retention": (), "service_tier": ("auto", "default"),
        "stream_options": ({"include_obfuscation": False}, {"include_obfuscation": True}),
    }  # fmt: skip

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


# -- as a chat request ------------------------------------------------------------------------------------
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
