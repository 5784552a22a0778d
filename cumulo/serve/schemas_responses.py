"""The request body of /v1/responses: text in, text out, nothing kept on the server."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from cumulo.serve.fields import Strict, TextOnly
from cumulo.serve.schemas import Label
from cumulo.serve.schemas_form import Description, Schema


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    name: Annotated[str, StringConstraints(max_length=256)] | None = Field(None, description="Not used.")
    description: Description | None = Field(None, description="Not used.")
    schema_: Schema | None = Field(None, alias="schema", description="With type json_schema.")
    strict: bool | None = Field(None, description="As in response_format of chat completions.")
    regex: Annotated[str, StringConstraints(min_length=1)] | None = Field(None, description="Extension.")
    grammar: Annotated[str, StringConstraints(min_length=1)] | None = Field(None, description="Extension.")


class TextOptions(Strict):
    format: TextFormat | None = None
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}


class InputText(TextOnly):
    type: Literal["input_text", "output_text"]
    text: str
    # Parts of an earlier answer come back with these.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"annotations": ([],), "logprobs": ([],)}


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(min_length=1)]
    id: Label | None = Field(None, description="Of an earlier answer; not used.")
    status: Label | None = Field(None, description="Of an earlier answer; not used.")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"phase": ()}


class ResponsesRequest(Strict):
    model: str = Field(description="The served model's name, as /v1/models lists it.")
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = Field(False, description="Send the answer as events while it is made.")
    text: TextOptions | None = Field(None, description="The form of the answer.")
    metadata: Annotated[dict[str, Label], Field(max_length=64)] | None = Field(
        None, description="Given back with the answer."
    )
    user: Label | None = Field(None, description="Accepted for compatibility; not used.")
    safety_identifier: Label | None = Field(None, description="Accepted for compatibility; not used.")
    prompt_cache_key: Label | None = Field(None, description="Accepted for compatibility; not used.")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (), "background": (False,), "context_management": (), "conversation": (), "image": (),
        "include": ([],), "max_tool_calls": (), "moderation": (), "parallel_tool_calls": (False, True),
        "previous_response_id": (), "prompt": (), "prompt_cache_options": (), "prompt_cache_retention": (),
        "reasoning": (), "service_tier": ("auto", "default"), "store": (False,),
        "stream_options": ({"include_obfuscation": False}, {"include_obfuscation": True}),
        "tool_choice": ("auto", "none"), "tools": ([],), "top_logprobs": (0,), "truncation": ("disabled",),
    }  # fmt: skip
