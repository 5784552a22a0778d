"""DirectRoute: how every JSON body reaches its endpoint, as ASGI middleware. Installed by `create_app`.

FastAPI's way to an endpoint (middleware, matching, dependencies, exit stacks) takes longer than reading a chat's
body and applying its template, and it reads every body on the event loop. So the bodies of all paths go through a
BodyReader, which bounds them and reads large ones elsewhere. An endpoint that takes nothing but a body and the
request, as `json_endpoints` finds them, is called from here. Other endpoints go FastAPI's way after their body has
been counted; so do small bodies with a mistake, which FastAPI words. The description is made from FastAPI's routes.
Warnings about a request (bodies/warnings.py) are added to its answer here.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cumulo.serve.bodies import warnings
from cumulo.serve.bodies.reader import BodyReader, Read

_ERROR = "cumulo.direct_route_error"
_WITH_BODY = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True)
class JsonEndpoint:
    """`quick`: reads a body of the commonest form, and raises ValueError for others."""

    call: Callable[[Any, Request], Awaitable[Response]]
    model: type[BaseModel]
    quick: Read | None = None


def json_endpoints(routers: Iterable[APIRouter]) -> dict[str, JsonEndpoint]:
    """By path: what is called with POST and takes `body`, a model, and `request`."""
    found = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.methods == {"POST"} and "{" not in route.path:
                parameters = inspect.signature(route.endpoint, eval_str=True).parameters
                model = parameters["body"].annotation if "body" in parameters else None
                takes_no_more = list(parameters) == ["body", "request"] and not route.dependencies
                if takes_no_more and inspect.isclass(model) and issubclass(model, BaseModel):
                    found[route.path] = JsonEndpoint(route.endpoint, model)
    return found


def install(
    app: FastAPI, endpoints: Mapping[str, JsonEndpoint], reader: BodyReader, lenient: bool = False
) -> None:
    """`lenient`: unknown fields of requests are ignored with a warning. Middleware added later comes before."""
    app.add_middleware(DirectRoute, endpoints=endpoints, reader=reader, lenient=lenient)
    app.router.routes.insert(0, _Failed())


class DirectRoute:
    def __init__(
        self, app: ASGIApp, endpoints: Mapping[str, JsonEndpoint], reader: BodyReader, lenient: bool
    ) -> None:
        self._app, self._endpoints, self._reader, self._lenient = app, endpoints, reader, lenient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        is_json, lenient = _said_in(scope["headers"])
        if not is_json:
            await self._app(scope, receive, send)
            return
        notes = warnings.open_notes(self._lenient or lenient)
        found = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        response = None
        try:
            messages, value = await self._reader.read(
                scope, receive, found.model if found else None, found.quick if found else None
            )
            if messages:
                receive = _again(messages, receive)
                notes.restart()
            elif found is not None:
                response = await found.call(value, Request(scope, receive, send))
        except Exception as error:
            scope[_ERROR] = error
        if response is None:
            await self._app(scope, receive, _warning(send, notes))
            return
        if (header := notes.header()) is not None:
            response.raw_headers.insert(0, (warnings.HEADER, header))
        await response(scope, receive, send)


class _Failed(BaseRoute):
    """Raises what an endpoint raised on the short way, where the application's handlers of exceptions see it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if _ERROR in scope else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: Exception = scope[_ERROR]
        raise error


def _said_in(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bool, bool]:
    """Whether the body is JSON, as FastAPI tells it (application/json and application/anything+json, by the first
    such header), and whether the client asks for leniency."""
    is_json: bool | None = None
    lenient = False
    for name, value in headers:
        if name == b"content-type" and is_json is None:
            kind = value.partition(b";")[0].strip().lower()
            is_json = kind.startswith(b"application/") and kind.endswith((b"/json", b"+json"))
        elif name == warnings.LENIENT_HEADER and value.strip().lower() in (b"1", b"true"):
            lenient = True
    return bool(is_json), lenient


def _warning(send: Send, notes: warnings.Notes) -> Send:
    """Sends an answer of FastAPI's with the warnings there are when it begins."""

    async def send_with_warnings(message: Message) -> None:
        if message["type"] == "http.response.start" and (header := notes.header()) is not None:
            message = {**message, "headers": [(warnings.HEADER, header), *message.get("headers", ())]}
        await send(message)

    return send_with_warnings


def _again(messages: list[Message], receive: Receive) -> Receive:
    """First what has been received already, then the rest."""
    earlier = iter(messages)

    async def receive_again() -> Message:
        for message in earlier:
            return message
        return await receive()

    return receive_again
