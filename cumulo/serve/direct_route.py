"""DirectRoute: the short way to the busiest endpoints. Put before FastAPI's own routes by `create_app`.

FastAPI's way to an endpoint (matching, dependencies, exit stacks) takes longer than reading a chat's body, applying
its template and tokenising it. A request in good form needs none of it: its body is decoded, checked by the same
pydantic model, and handed to the same function. Whatever is not in good form goes FastAPI's way, which words the
error; the description, too, is made from FastAPI's routes.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Endpoint = Callable[[Any, Request], Awaitable[Response]]

_TRIED = "cumulo.direct_route_tried"


class DirectRoute(BaseRoute):
    def __init__(self, otherwise: ASGIApp, endpoints: Mapping[str, tuple[type[BaseModel], Endpoint]]) -> None:
        """`endpoints` by path: what the body is read as, and who gets it. `otherwise`: the router this is in."""
        self._otherwise, self._endpoints = otherwise, endpoints

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._endpoints:
            return Match.NONE, {}
        return (Match.NONE if _TRIED in scope or not _is_json(scope) else Match.FULL), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        model, endpoint = self._endpoints[scope["path"]]
        messages, whole = await _body(receive)
        try:
            body = model.model_validate_json(whole)
        except ValueError:
            scope[_TRIED] = True
            await self._otherwise(scope, _again(messages, receive), send)
            return
        response = await endpoint(body, Request(scope, receive, send))
        await response(scope, receive, send)


def _is_json(scope: Scope) -> bool:
    return any(
        name == b"content-type" and value.lower().startswith(b"application/json")
        for name, value in scope["headers"]
    )


async def _body(receive: Receive) -> tuple[list[Message], bytes]:
    """The messages that brought the body, and the body; nothing in place of one whose sender left half-way."""
    messages: list[Message] = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, b""
        if not message.get("more_body", False):
            return messages, b"".join(part.get("body", b"") for part in messages)


def _again(messages: list[Message], receive: Receive) -> Receive:
    """First what has been received already, then the rest."""
    earlier = iter(messages)

    async def receive_again() -> Message:
        for message in earlier:
            return message
        return await receive()

    return receive_again
