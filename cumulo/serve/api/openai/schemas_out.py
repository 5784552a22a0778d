"""What the endpoints answer, for the OpenAPI description; the answers themselves are built as plain data.

`schemas_out.yaml` has the schemas, and an endpoint names its own: `responses=answer("Model")`.
"""

from typing import Any

from cumulo.base.strict import package_yaml

Told = dict[int | str, dict[str, Any]]  # the `responses` of an endpoint, by status
_TYPES = ("string", "integer", "number", "boolean", "object", "null")


def schemas() -> dict[str, Any]:
    """The schemas by name, as components of the description."""
    found = package_yaml("cumulo.serve.api.openai", "schemas_out.yaml")
    return {name: _schema(one) if isinstance(one, list) else _object(one) for name, one in found.items()}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name.removesuffix("?"): _schema(one) for name, one in fields.items()},
        "required": [name for name in fields if not name.endswith("?")],
    }


def _schema(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    if isinstance(given, list):
        return {"type": "array", "items": _schema(given[0])}
    several = [{"type": name} if name in _TYPES else _named(name) for name in given.split(" or ")]
    return several[0] if len(several) == 1 else {"anyOf": several}


def _named(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def answer(name: str, status: int = 200, **more: Any) -> Told:
    """JSON of the schema of this name."""
    return {status: {"content": {"application/json": {"schema": _named(name)}}, **more}}


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


def _errors(name: str, *without: int) -> Told:
    told = {status: words for status, words in _DESCRIPTIONS.items() if status not in without}
    return {status: answer(name, status, description=words)[status] for status, words in told.items()}


# The errors that a router's endpoints can give, in OpenAI's shape, in Anthropic's and in Ollama's.
ERRORS = _errors("Error", 403, 409)
OPERATOR_ERRORS = _errors("Error")
ANTHROPIC_ERRORS = _errors("AnthropicError", 403, 409)
OLLAMA_ERRORS = _errors("OllamaError", 409)

# One server-sent event; JSON Schema has no word for "JSON, or at the end [DONE]".
_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "Of /v1/responses and /v1/messages: the kind of event."},
        "data": {"type": "string", "description": "A chunk as JSON; at the end of completions [DONE]."},
    },
    "required": ["data"],
}


def streamed(name: str) -> Told:
    """JSON, or with `stream: true` server-sent events."""
    told = answer(
        name,
        description="The answer; with `stream: true` as server-sent events. Completions end with [DONE].",
    )
    told[200]["content"]["text/event-stream"] = {"schema": _EVENT}
    return told


# Lines of JSON, as Ollama's API streams them.
STREAMED_LINES: Told = {
    200: {
        "description": "The answer; unless `stream` is false, line by line.",
        "content": {"application/x-ndjson": {}},
    }
}
