"""The request bodies of the API, as OpenAI's client sends them, plus documented extensions.

Everything is checked here or by SamplingParams. Nothing that arrives is ignored in silence: fields of messages and
tools that are not known are left out with a warning.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from cumulo.serve.api.openai.asked_form import (
    MAX_CALLS,
    MAX_STOP_STRINGS,
    ResponseFormat,
    StopString,
    StructuredOutputs,
    ToolCall,
    ToolChoice,
    Tools,
)
from cumulo.serve.bodies.strict import Strict, of_type, settle_unknown
from cumulo.spec.slo import Slo

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
