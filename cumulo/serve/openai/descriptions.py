"""What the OpenAPI description says of every endpoint's answers: what it gives, and how it can refuse."""

from typing import Any

from pydantic import BaseModel

from cumulo.serve.openai.schemas_out import AnthropicError, Error

_ERRORS: dict[int, str] = {
    400: "The request is malformed, holds an unknown field, or asks for something impossible.",
    401: "The API key is missing or not valid.",
    403: "This API key may not operate the server.",
    404: "There is no such model or request here.",
    409: "It is not possible now; the message says what would be.",
    413: "The body is too large.",
    429: "Too many requests or tokens, or too many waiting; Retry-After says when to come again.",
    503: "Loading, restarting or shutting down; Retry-After says when to come again.",
}

_USUAL = (400, 401, 404, 413, 429, 503)  # of endpoints that compute

# One server-sent event; JSON Schema has no word for "JSON, or at the end [DONE]".
_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "Of /v1/responses and /v1/messages: the kind of event."},
        "data": {"type": "string", "description": "A chunk as JSON; at the end of completions [DONE]."},
    },
    "required": ["data"],
}


def answers(good: dict[str, Any], *errors: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: the good one, and the errors it can give (all of them if none are named)."""
    chosen = errors or _USUAL
    described: dict[int | str, dict[str, Any]] = {200: good}
    for status in chosen:
        described[status] = {"model": Error, "description": _ERRORS[status]}
    return described


def anthropic_answers(good: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The same for paths under /v1/messages, whose errors have Anthropic's shape."""
    described = answers(good)
    for status in _USUAL:
        described[status]["model"] = AnthropicError
    return described


def streamed(model: type[BaseModel]) -> dict[str, Any]:
    """An answer that is JSON, or with `stream: true` server-sent events."""
    return {
        "model": model,
        "description": "The answer; with `stream: true` as server-sent events. Completions end with [DONE].",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }


def plain(model: type[BaseModel], description: str) -> dict[str, Any]:
    return {"model": model, "description": description}
