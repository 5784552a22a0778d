"""What the endpoints answer, for the OpenAPI description; the answers themselves are built as plain data."""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from cumulo.ranks.rank_meter import RankState


class OllamaError(BaseModel):
    error: str


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorBody


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None  # not in the counts of an unfinished stream


class InputUsage(BaseModel):
    """The counts of a request that has no answer in tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


Entry = TypeVar("Entry")


class Page(BaseModel, Generic[Entry]):
    object: Literal["list"]
    data: list[Entry]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    id: str
    object: Literal["file", "response"]
    deleted: Literal[True]


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobWithTop(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprobWithTop]
    refusal: None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class Explanation(BaseModel):
    id: str
    object: Literal["request.explanation"]
    state: Literal["running", "finished"]
    finish_reason: str | None
    error: str | None
    model: str
    received_at: float
    summary: str
    times_ms: dict[str, float | None]  # tokenised, queued, first_token, total, and gaps between tokens
    tokens: dict[str, int | None]  # prompt, output, cached, recomputed, drafted, accepted
    preemptions: int | None
    retried_after_engine_restart: bool
    replicas: list[str]
    events: list[dict[str, Any]]


class ExplanationList(BaseModel):
    id: str
    object: Literal["list"]
    data: list[Explanation]


class ReplicaAnswer(BaseModel):
    name: str
    object: Literal["fleet.replica"]
    state: Literal["starting", "ready", "draining", "restarting", "removing", "stopped"]
    detail: str | None
    pid: int | None
    in_flight: int
    running: int
    waiting: int
    waiting_tokens: int
    blocks: dict[str, int]  # used, total, cached, and of the cached ones also_elsewhere
    prompt_tok_s: float | None
    step_ms: float | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ranks: list[RankState]
    restarts: int
    last_failure: str | None


class FleetAnswer(BaseModel):
    object: Literal["fleet"]
    router: str
    replicas: list[ReplicaAnswer]
    decisions: list[dict[str, Any]]  # the newest first
    autoscale: dict[str, Any] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    system_fingerprint: str | None = None
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    generation_defaults: dict[str, float | None] | None  # what a request that leaves it out gets
    root: str  # of an adapter: its folder
    parent: str | None  # of an adapter: the model it adapts
    # Of a model that is loaded on request; the server's first model has none.
    state: Literal["unloaded", "loading", "loaded", "unloading"] | None = None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class AdapterAnswer(BaseModel):
    name: str
    object: Literal["adapter"]
    state: Literal["loaded", "leaving", "dropped"]  # leaving: its last requests are being answered
    path: str
    rank: int
    fingerprint: str
    running: int  # calls that are being answered with it
    created: int


class Tokenized(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class Health(BaseModel):
    status: str
    engine: str
    detail: str | None
    restarts: int
    running: int
    waiting: int


class Version(BaseModel):
    version: str


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: dict[str, Any]
    user: str | None


class AnthropicErrorBody(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


class AnthropicUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    input_tokens: int


_DESCRIPTIONS = {
    400: "The request is malformed, holds an unknown field, or asks for something impossible.",
    401: "The API key is missing or not valid.",
    403: "This API key may not operate the server.",
    404: "There is no such model, request or file here.",
    409: "It is not possible now; the message says what would be.",
    413: "The body is too large.",
    429: "Too many requests or tokens, or too many waiting; Retry-After says when to come again.",
    503: "Loading, restarting or shutting down; Retry-After says when to come again.",
}


def _errors(model: type[BaseModel], *without: int) -> dict[int | str, dict[str, Any]]:
    told = {status: words for status, words in _DESCRIPTIONS.items() if status not in without}
    return {status: {"model": model, "description": words} for status, words in told.items()}


# The errors that a router's endpoints can give, in OpenAI's shape, in Anthropic's and in Ollama's.
ERRORS = _errors(Error, 403, 409)
OPERATOR_ERRORS = _errors(Error)
ANTHROPIC_ERRORS = _errors(AnthropicError, 403, 409)
OLLAMA_ERRORS = _errors(OllamaError, 409)

# One server-sent event; JSON Schema has no word for "JSON, or at the end [DONE]".
_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "Of /v1/responses and /v1/messages: the kind of event."},
        "data": {"type": "string", "description": "A chunk as JSON; at the end of completions [DONE]."},
    },
    "required": ["data"],
}


# The `responses` of an endpoint that answers with JSON, or with `stream: true` with server-sent events.
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream: true` as server-sent events. Completions end with [DONE].",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
}
# ... or with lines of JSON, as Ollama's API does.
STREAMED_LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; unless `stream` is false, line by line.",
        "content": {"application/x-ndjson": {}},
    }
}
