"""The request bodies of the API, as OpenAI's client sends them, plus documented extensions.

Everything is checked here or by SamplingParams. Nothing that arrives is ignored in silence: fields of messages and
tools that are not known are left out with a warning.
"""

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from cumulo.serve.bodies.strict import Strict, of_type, settle_unknown
from cumulo.spec.slo import Slo

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


MAX_BIASES = 1024
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message; a body's structure bounds those of all (bodies/structure.py)
MAX_BEAMS = 50
MAX_TEMPLATE_VARIABLES = 64

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Label = Annotated[str, StringConstraints(max_length=512)]
Temperature = Annotated[float, Field(ge=0, le=2, description="0: always the likeliest token.")]
ParsesSpecial = Annotated[
    bool | None,
    Field(description="Extension: true recognises special tokens in what is given; otherwise they are text."),
]
TopP = Annotated[float, Field(gt=0, le=1)]
TemplateVariables = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="Send token counts in a last chunk of their own.")
    continuous_usage_stats: bool = Field(
        False, description="Extension, with include_usage: every chunk has the token counts so far."
    )
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False, True)}


class AskedSlo(Strict):
    ttft_ms: float | None = Field(None, gt=0, le=1e7, description="Time to the first token.")
    itl_ms: float | None = Field(None, gt=0, le=1e7, description="Time between two tokens, for 99% of them.")

    @model_validator(mode="after")
    def _needs_a_bound(self) -> "AskedSlo":
        if self.ttft_ms is None and self.itl_ms is None:
            raise PydanticCustomError("slo_empty", "slo needs ttft_ms, itl_ms or both")
        return self

    def as_slo(self) -> Slo:
        ttft_s, itl_s = (bound if bound is None else bound / 1e3 for bound in (self.ttft_ms, self.itl_ms))
        return Slo(ttft_s, itl_s)


class ModelRequest(Strict):
    """What every request that the engine works on has."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    user: Label | None = Field(None, description="Accepted for compatibility; not used.")
    # -- extensions
    priority: int | None = Field(None, ge=-100, le=100, description="Extension: lower goes first.")
    cache_salt: Label | None = Field(
        None, description="Extension: share cached prefixes only with requests of the same salt."
    )


# Other servers' names of fields. vLLM's ways to ask for a form, older and newer, become a response_format.
_SAME_MEANING = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_FORMS = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
_FORMS |= {"json_schema": "json", "grammar": "grammar"}


class Sampling(ModelRequest):
    """What chat and text completions have in common. Names that vLLM and llama.cpp have for the same are taken,
    too: structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar, grammar, json_schema,
    n_predict, repeat_penalty."""

    @model_validator(mode="before")
    @classmethod
    def _use_our_names(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.keys().isdisjoint(
            {"structured_outputs", *_FORMS, *_SAME_MEANING}
        ):
            return data
        kept = dict(data)
        meant = {_SAME_MEANING[name]: kept.pop(name) for name in _SAME_MEANING if kept.get(name) is not None}
        forms = {_FORMS[name]: kept.pop(name) for name in _FORMS if kept.get(name) is not None}
        if (asked := kept.pop("structured_outputs", None)) is not None:
            forms = asked
        if forms or asked is not None:
            wanted = StructuredOutputs.model_validate(forms)
            settle_unknown(wanted, "structured_outputs.")
            meant["response_format"] = wanted.as_response_format()
        for name in meant:
            if kept.get(name) is not None:
                raise PydanticCustomError(
                    "named_twice", "{name} is given under two names; leave one out", {"name": name}
                )
        return kept | meant

    stream: bool | None = Field(False, description="Send the answer as server-sent events while it is made.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=128, description="How many answers.")
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1, description="Same seed, same answer.")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
    ) = Field(None, description="Token id (as text) to what is added to its logit.")
    # -- extensions
    top_k: int | None = Field(None, ge=0, le=1 << 31, description="Extension: keep the k likeliest; 0: all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Extension: drop what is this much less likely."
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Extension: above 1 avoids repeats."
    )
    min_tokens: int | None = Field(None, ge=0, le=1 << 31, description="Extension: no end before this many.")
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Extension: tokens that end an answer."
    )
    ignore_eos: bool | None = Field(None, description="Extension: go on past the model's own end.")
    skip_special_tokens: bool | None = Field(
        None, description="Extension: false shows special tokens as text."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Extension: keep the stop string.")
    slo: AskedSlo | None = Field(
        None,
        description="Extension: the latency to promise, instead of the key's or the server's; 429 if it cannot be "
        "kept.",
    )
    use_beam_search: bool | None = Field(
        None, description="Extension: search for the n likeliest answers instead of sampling."
    )
    beam_width: int | None = Field(
        None,
        ge=1,
        le=MAX_BEAMS,
        description="Extension: beam search with so many beams; left out: n of them.",
    )
    length_penalty: float | None = Field(
        None,
        ge=-10,
        le=10,
        description="Extension: a beam's score is its log-probability / length ** this; 1.",
    )
    response_format: ResponseFormat | None = Field(None, description="The form the answer must have.")
    bad_words: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Extension: whole words that the answer must not have."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=1 << 31,
        description="Extension: keep so many of the prompt's last tokens; -1: as fit.",
    )
    logprob_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Extension: tell the log-probabilities of these tokens instead of the likeliest."
    )
    return_token_ids: bool | None = Field(
        None, description="Extension: add the token ids of the prompt and of every answer."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Extension: log-probabilities of the prompt's tokens, with alternatives.",
    )


class TextPart(Strict):
    type: Literal["text"]
    text: str
    ignores_unknown: ClassVar[bool] = True


TEXT_ONLY = "this server reads text only (parts of type {known}), not '{kind}'"
TextParts = Annotated[
    list[Annotated[TextPart, of_type("text", words=TEXT_ONLY)]], Field(min_length=1, max_length=MAX_PARTS)
]


class Message(Strict):
    """Which fields a role needs is checked where messages become a prompt (conversation.py)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | TextParts | None = Field(
        None, description="May be left out only by an assistant that called tools."
    )
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = Field(
        None, description="Assistant: the calls it made."
    )
    tool_call_id: Label | None = Field(None, description="Tool: the call whose result this is.")
    reasoning_content: str | None = Field(
        None, description="Assistant: what it thought before; used if the model's chat template does."
    )
    ignores_unknown: ClassVar[bool] = True
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "refusal": (), "audio": (), "annotations": ([],), "parsed": (), "function_call": (),
    }  # fmt: skip


class Templated(Strict):
    """What the chat template gets besides messages."""

    tools: Tools | None = Field(None, description="What the model may call.")
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="A variable of the model's chat template; none and minimal also switch thinking off.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="Extension: false leaves out the template's opening of an answer."
    )
    continue_final_message: bool | None = Field(
        None, description="Extension: the answer continues the last message, which must be an assistant's."
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Extension: variables for the model's chat template, for instance enable_thinking."
    )


class ChatRequest(Sampling, Templated):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    logprobs: bool | None = Field(False, description="Give each token's log-probability.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="And of this many alternatives.")
    metadata: Annotated[dict[str, Label], Field(max_length=64)] | None = Field(
        None, description="Accepted for compatibility; not used."
    )
    safety_identifier: Label | None = Field(None, description="Accepted for compatibility; not used.")
    prompt_cache_key: Label | None = Field(
        None,
        description="With several replicas, requests with the same key prefer the same one. Prompts are cached by "
        "their content in any case.",
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether it may, must, must call this one, or which ones. Left out: auto if there are tools.",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call per answer.")
    store: bool | None = Field(None, description="Accepted for compatibility; nothing is stored.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None, description="Accepted for compatibility: every request is served as default."
    )
    instead: ClassVar[dict[str, str]] = {
        "functions": "write them as tools",
        "function_call": "use tool_choice",
    }
    echo: bool | None = Field(
        None, description="Extension, with continue_final_message: the answer begins with the continued text."
    )
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (), "function_call": ("none",), "functions": ([],), "modalities": (["text"],), "moderation": (),
        "prediction": (), "prompt_cache_options": (), "prompt_cache_retention": (), "verbosity": ("medium",),
        "web_search_options": (),
    }  # fmt: skip


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ]
    ) = Field(description="A text, its tokens, or several of either.")
    max_tokens: int | None = Field(None, ge=0, le=1 << 31, description="16 if left out; 0 only with echo.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Log-probabilities with so many alternatives."
    )
    best_of: int | None = Field(None, ge=1, le=128, description="Draw so many, return the n likeliest.")
    echo: bool | None = Field(False, description="Put the prompt before the answer.")
    parse_special_tokens: ParsesSpecial = None
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}


class TokenizeRequest(Templated):
    """A prompt, or messages with what goes with them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = Field(True, description="With a prompt: add those the model was trained with.")
    parse_special_tokens: ParsesSpecial = None
    return_token_strs: bool = Field(False, description="Also give each token's text.")


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Token], Field(max_length=1 << 20)]
