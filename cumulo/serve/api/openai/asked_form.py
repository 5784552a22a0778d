"""The form that a request asks its answer to have: a format, a schema or a grammar, or calls of tools."""

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from cumulo.serve.bodies.strict import Strict, of_type

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 512

StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]

FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
Description = Annotated[str, StringConstraints(max_length=65_536)]
Schema = dict[str, Any]


class SchemaFields(Strict):
    description: Description | None = Field(None, description="For people; not used.")
    schema_: Schema | None = Field(None, alias="schema", description="Left out: any JSON object.")
    strict: bool | None = Field(
        None, description="false: keywords that cannot be enforced are passed over instead of refused."
    )


class JsonSchema(SchemaFields):
    name: Annotated[str, StringConstraints(max_length=256)] = Field("", description="For people; not used.")


class AnswerFormat(Strict):
    """Tokens that would leave the form are never drawn."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    regex: Annotated[str, StringConstraints(min_length=1)] | None = Field(
        None, description="Extension, with type regex: the whole answer matches it."
    )
    grammar: Annotated[str, StringConstraints(min_length=1)] | None = Field(
        None, description="Extension, with type grammar: a grammar in Lark or GBNF."
    )


class ResponseFormat(AnswerFormat):
    json_schema: JsonSchema | None = Field(None, description="With type json_schema.")

    @model_validator(mode="before")
    @classmethod
    def _take_a_schema(cls, data: Any) -> Any:
        """llama.cpp's clients put the schema next to the type json_object."""
        if isinstance(data, dict) and data.get("type") == "json_object" and data.get("schema") is not None:
            kept = {name: value for name, value in data.items() if name != "schema"}
            return kept | {"type": "json_schema", "json_schema": {"schema": data["schema"]}}
        return data


class StructuredOutputs(Strict):
    """A form of the answer as vLLM's clients ask for it; `response_format` says the same."""

    json_: Schema | str | None = Field(None, alias="json", description="A JSON schema, also as text.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[StopString], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = Field(None, description="A grammar in Lark or GBNF.")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "disable_additional_properties": (False,), "disable_any_whitespace": (False,),
        "disable_fallback": (False, True), "structural_tag": (), "whitespace_pattern": (),
    }  # fmt: skip

    def as_response_format(self) -> dict[str, Any]:
        given = {name: value for name, value in self if value not in (None, False)}
        if len(given) != 1:
            raise PydanticCustomError(
                "one_form", "structured_outputs needs one of json, json_object, regex, choice and grammar"
            )
        ((kind, value),) = given.items()
        if kind == "json_object":
            return {"type": "json_object"}
        if kind == "json_":
            return {"type": "json_schema", "json_schema": {"name": "schema", "schema": _parsed(value)}}
        if kind == "choice":
            return {"type": "regex", "regex": "|".join(map(literal, value))}
        return {"type": kind, kind: value}


def _parsed(schema: Any) -> Any:
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        raise PydanticCustomError("no_schema", "the JSON schema is no valid JSON") from None


def literal(text: str) -> str:
    """A regular expression in llguidance's language that matches this text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text)


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


# OpenAI's other kinds (`custom` and what its own servers run) are refused in words of their own.
FUNCTIONS_ONLY = of_type(
    "function",
    words="this server calls tools of the type {known}, not '{kind}'; describe it as a function with a JSON schema "
    "of its parameters",
)
Tools = Annotated[list[Annotated[Tool, FUNCTIONS_ONLY]], Field(max_length=MAX_TOOLS)]


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
