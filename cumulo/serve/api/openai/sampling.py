"""From a request's fields to SamplingParams: what is left out takes the model's own recommendation.

Beam search: what has no meaning in a search, or what the engine cannot do in one, is refused by its name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.serve.api.openai.schemas import ChatRequest, CompletionRequest
from cumulo.serve.errors import invalid

# Fields that a search has no use for, each with the values that ask for nothing.
_MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1), "top_p": (1,), "top_k": (0,), "min_p": (0,), "logprobs": (False,), "stop": ([],),
    "response_format": (), "bad_words": ([],), "tools": ([],), "best_of": (), "logprob_token_ids": ([],),
}  # fmt: skip
_WHY = {
    "logprobs": "the engine keeps none for beams",
    "stop": "the engine compares beams by tokens: use stop_token_ids",
    "response_format": "a guide cannot steer beam search",
    "bad_words": "a guide cannot steer beam search",
    "tools": "a guide cannot steer beam search",
    "best_of": "set n and beam_width",
    "logprob_token_ids": "the engine keeps none for beams",
}
_DRAWING = ("temperature", "top_k", "top_p", "min_p")


def is_search(body: ChatRequest | CompletionRequest) -> bool:
    return bool(body.use_beam_search or body.beam_width is not None)


def search_for(body: ChatRequest | CompletionRequest, fields: dict[str, Any]) -> None:
    """Put what the request says about beam search into the fields of its SamplingParams."""
    n = body.n or 1
    if body.use_beam_search is False and body.beam_width is not None:
        raise invalid("beam_width needs use_beam_search, which is false: leave one of them out", "beam_width")
    if not is_search(body):
        if body.length_penalty is not None:
            raise invalid("length_penalty needs beam search: give beam_width, too", "length_penalty")
        return
    width = body.beam_width or n
    if n > width:
        raise invalid(f"n ({n}) is more than beam_width ({width}): a search returns its best beams", "n")
    for name, neutral in _MEANINGLESS.items():
        value = getattr(body, name, None)
        asks_nothing = value is None or value in neutral or getattr(value, "type", None) == "text"
        if not asks_nothing:
            why = _WHY.get(name, "a search does not draw at random")
            raise invalid(f"{name} has no meaning with beam search ({why}): leave it out", name)
    for name in _DRAWING:
        fields.pop(name, None)  # also what the model's authors recommend
    fields["beam_width"] = width
    if body.length_penalty is not None:
        fields["length_penalty"] = body.length_penalty


_SAME_NAME = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "ignore_eos", "skip_special_tokens", "n",
)  # fmt: skip
_COMPLETION_LENGTH = 16  # OpenAI's default where max_tokens is left out


def default_limit(body: ChatRequest, default_max_tokens: int, room: int) -> int | None:
    """The server's limit on an answer that has none of its own, if that comes before the end of the context (`room`
    tokens away). `default_max_tokens` 0: none."""
    if body.max_tokens is not None or body.max_completion_tokens is not None or not default_max_tokens:
        return None
    limit = max(default_max_tokens, body.min_tokens or 0)
    return limit if limit < room else None


def chat_params(
    body: ChatRequest,
    defaults: Mapping[str, Any],
    guide: Guide | None = None,
    show_special: bool = False,
    default_max_tokens: int | None = None,
) -> SamplingParams:
    """`show_special`: markers of the answer's form are special tokens, so its text must hold them.
    `default_max_tokens`: of an answer whose request has no limit; None: as many as fit."""
    fields = _common(body, defaults)
    fields["guide"] = guide
    if show_special:
        fields["skip_special_tokens"] = False
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("give max_tokens or max_completion_tokens, not both", "max_tokens")
    fields["max_tokens"] = body.max_completion_tokens or body.max_tokens or default_max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        fields["logprobs"] = _alternatives(body, body.top_logprobs or 0)
    return SamplingParams(**fields)


def completion_params(
    body: CompletionRequest, defaults: Mapping[str, Any], guide: Guide | None = None
) -> SamplingParams:
    fields = _common(body, defaults)
    fields["guide"] = guide
    fields["max_tokens"] = _COMPLETION_LENGTH if body.max_tokens is None else max(1, body.max_tokens)
    fields["logprobs"] = _alternatives(body, body.logprobs)
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise invalid(f"best_of ({body.best_of}) must be at least n ({body.n})", "best_of")
        if body.stream and body.best_of > (body.n or 1):
            raise invalid("best_of is known only at the end, so it cannot be streamed", "best_of")
        fields["best_of"] = body.best_of
    return SamplingParams(**fields)


def _alternatives(body: ChatRequest | CompletionRequest, likeliest: int | None) -> int | None:
    """How many are told with a token; those that the request names come with the drawn one."""
    return likeliest if likeliest is None or not body.logprob_token_ids else len(body.logprob_token_ids) + 1


def _common(body: ChatRequest | CompletionRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    fields = dict(defaults)
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    if body.prompt_logprobs is not None:
        if body.stream:
            raise invalid("prompt_logprobs come with the whole answer: leave stream out", "prompt_logprobs")
        fields["prompt_logprobs"] = body.prompt_logprobs
    search_for(body, fields)
    fields["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    fields["stop_token_ids"] = tuple(body.stop_token_ids or ())
    fields["logprob_token_ids"] = tuple(body.logprob_token_ids or ())
    fields["include_stop"] = bool(body.include_stop_str_in_output)
    fields["logit_bias"] = _biases(body.logit_bias or {})
    return fields


def last_tokens(
    body: ChatRequest | CompletionRequest, tokens: list[int], max_context: int, max_tokens: int | None
) -> list[int]:
    """What `truncate_prompt_tokens` leaves of a prompt."""
    kept = body.truncate_prompt_tokens
    if kept is None:
        return tokens
    if kept == -1:
        kept = max(1, max_context - (max_tokens or 1))
    return tokens[max(0, len(tokens) - kept) :]


def check_tokens(prompts: Sequence[Sequence[int]], params: SamplingParams, vocab_size: int) -> None:
    """The engine would refuse token ids that the model does not have; here the field is known, too."""
    fields = ((name, getattr(params, name)) for name in ("logit_bias", "stop_token_ids", "logprob_token_ids"))
    for name, tokens in (*(("prompt", prompt) for prompt in prompts), *fields):
        if tokens and max(tokens) >= vocab_size:
            raise invalid(
                f"{name} has the token {max(tokens)}; this model's token ids are 0 to {vocab_size - 1}",
                name,
                "invalid_value",
            )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 11):
            raise invalid(f"logit_bias names {token[:40]!r}, which is no token id", "logit_bias")
        biases[int(token)] = bias
    return biases
