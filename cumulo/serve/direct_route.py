"""DirectRoute: the short way to the busiest endpoints, as ASGI middleware. Installed by `create_app`.

FastAPI's way to an endpoint (middleware, matching, dependencies, exit stacks) takes longer than reading a chat's
body and applying its template. A request in good form needs none of it: its body is read by a function that takes
what the pydantic model would take, and handed to the same endpoint. Whatever is not in good form goes FastAPI's
way, which words the error; the description, too, is made from FastAPI's routes.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Endpoint = Callable[[Any, Request], Awaitable[Response]]
Read = Callable[[bytes], Any]  # raises ValueError on a body that is not in good form

_ERROR = "cumulo.direct_route_error"


def install(app: FastAPI, endpoints: Mapping[str, tuple[Read, Endpoint]]) -> None:
    """`endpoints` by path: who reads the body, and who gets it. Middleware added later comes before."""
    app.add_middleware(DirectRoute, endpoints=endpoints)
    app.router.routes.insert(0, _Failed())


class DirectRoute:
    def __init__(self, app: ASGIApp, endpoints: Mapping[str, tuple[Read, Endpoint]]) -> None:
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["method"] != "POST" or not _is_json(scope):
            await self._app(scope, receive, send)
            return
        read, endpoint = found
        try:
            messages, whole = await _body(receive)
            try:
                body = read(whole)
            except ValueError:
                receive = _again(messages, receive)
                response = None
            else:
                response = await endpoint(body, Request(scope, receive, send))
        except Exception as error:
            scope[_ERROR] = error
            response = None
        await (self._app if response is None else response)(scope, receive, send)


class _Failed(BaseRoute):
    """Raises what an endpoint raised on the short way, where the application's handlers of exceptions see it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if _ERROR in scope else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: Exception = scope[_ERROR]
        raise error


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
