"""The API key that a request shows. Used by the gates of server and gateway."""

from starlette.datastructures import Headers

from cumulo.serve.errors import ApiError


def shown_key(headers: Headers) -> str:
    """As OpenAI's clients send it, or as Anthropic's do; raises ApiError where there is none, or two."""
    keys = {value.strip() for value in headers.getlist("x-api-key")}
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            keys.add(key.strip())
    keys.discard("")
    if not keys:
        raise no_entry("no API key was sent; send one as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`")
    if len(keys) > 1:
        raise no_entry("different API keys were sent in `Authorization` and `X-Api-Key`; send one")
    return keys.pop()


def no_entry(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
