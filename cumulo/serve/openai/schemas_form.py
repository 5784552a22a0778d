"""The parts of a chat request that say which form the answer takes: `response_format`, `tools`, `tool_choice`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator
from pydantic_core import PydanticCustomError

from cumulo.serve.openai.fields import Strict

MAX_TOOLS = 128
MAX_CALLS = 128

FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
Description = Annotated[str, StringConstraints(max_length=65_536)]
Schema = dict[str, Any]


class JsonSchema(Strict):
    name: Annotated[str, StringConstraints(max_length=256)] = Field(description="For people; not used.")
    description: Description | None = Field(None, description="For people; not used.")
    schema_: Schema | None = Field(None, alias="schema", description="Left out: any JSON object.")
    strict: bool | None = Field(
        None, description="false: keywords that cannot be enforced are passed over instead of refused."
    )


class ResponseFormat(Strict):
    """Tokens that would leave the form are never drawn."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = Field(None, description="With type json_schema.")
    regex: Annotated[str, StringConstraints(min_length=1)] | None = Field(
        None, description="Extension, with type regex: the whole answer matches it."
    )
    grammar: Annotated[str, StringConstraints(min_length=1)] | None = Field(
        None, description="Extension, with type grammar: a Lark grammar in llguidance's dialect."
    )


class Function(Strict):
    name: FunctionName
    description: Description | None = None
    parameters: Schema | None = Field(
        None, description="A JSON schema of its arguments; left out: it has none."
    )
    strict: bool | None = Field(
        None, description="true: refuse keywords of the schema that cannot be enforced."
    )
    ignores_unknown: ClassVar[bool] = True


class Tool(Strict):
    type: Literal["function"]
    function: Function
    ignores_unknown: ClassVar[bool] = True

    @field_validator("type", mode="before")
    @classmethod
    def _is_function(cls, kind: Any) -> Any:
        """OpenAI's other kinds (`custom` and what its own servers run) are refused in words of their own."""
        if isinstance(kind, str) and kind != "function":
            raise PydanticCustomError(
                "unsupported_tool",
                "this server calls tools of the type 'function', not '{kind}'; describe it as a function with a "
                "JSON schema of its parameters",
                {"kind": kind[:64].encode("utf-8", "backslashreplace").decode()},
            )
        return kind


class ChosenFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: ChosenFunction


class AllowedList(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    """A choice among some of the tools: the model sees all of them and calls none but these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


def _kind_of_choice(given: Any) -> str:
    """Only one form is tried, so that an error speaks of the form the client meant. errors.py knows these names."""
    if isinstance(given, dict):
        return "AllowedTools" if given.get("type") == "allowed_tools" else "NamedTool"
    return type(given).__name__ if isinstance(given, NamedTool | AllowedTools) else "str"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[NamedTool, Tag("NamedTool")]
    | Annotated[AllowedTools, Tag("AllowedTools")],
    Discriminator(_kind_of_choice),
]


class CalledFunction(Strict):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    arguments: str = Field(description="A JSON object, as text.")
    ignores_unknown: ClassVar[bool] = True


class ToolCall(Strict):
    """A call that the assistant made earlier in the conversation."""

    id: Annotated[str, StringConstraints(max_length=512)]
    type: Literal["function"] = "function"
    function: CalledFunction
    ignores_unknown: ClassVar[bool] = True
    # OpenAI's client adds these when it hands back what it has parsed or streamed.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"index": tuple(range(MAX_CALLS)), "parsed_arguments": ()}
