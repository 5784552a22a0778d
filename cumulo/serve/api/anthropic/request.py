"""The request bodies of /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from cumulo.serve.api.openai.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    Description,
    FunctionName,
    Label,
    Schema,
    StopString,
    Temperature,
    TopP,
)
from cumulo.serve.bodies.strict import Strict, kind_of, of_type

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
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (), "context_management": (), "diagnostics": (), "inference_geo": (), "mcp_servers": ([],),
        "speed": ("standard",),
    }  # fmt: skip


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
