"""Gate: what every HTTP request passes before an endpoint sees it, as plain ASGI middleware.

In this order, cheapest first: is the server draining (503), who is it (401), do they ask too often (429), is the
body too large (413). Counts and logs what goes out, with the request's id and the warnings about it in its
headers. Health, metrics and the description need no key. HEAD is answered wherever GET is.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cumulo.serve.access.keys import CALLER_KEY, Caller, no_entry, shown_key
from cumulo.serve.bodies import warnings
from cumulo.serve.errors import ApiError, shaped, speaks_anthropic
from cumulo.serve.http.limits import FORM_BYTES
from cumulo.serve.model_table import LET_GO
from cumulo.serve.observe.stories import MOST_REASON_BYTES, Rejection
from cumulo.serve.service import Service

log = logging.getLogger("cumulo.serve.access")

_PROTECTED = ("/v1/", "/v2/", "/api/", "/tokenize", "/detokenize", "/rerank", "/score")
_QUIET = ("/health", "/ready", "/metrics")
# Of a refused body so much is still read and thrown away: a client that is hung up on while it sends may lose the
# answer with the connection.
_DISCARD_BYTES = 64 << 20
_DISCARD_S = 5.0


class Gate:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the transport sends no body
            scope = {**scope, "method": "GET"}
        received_s = time.perf_counter()
        state: dict[str, Any] = scope.setdefault("state", {})
        state["received_s"], state["caller"] = received_s, self._service.anyone
        exchange = _Exchange(self._service, scope, receive, send)
        protected = scope["path"].startswith(_PROTECTED)
        try:
            if protected and scope["method"] != "OPTIONS":
                self._check(scope, exchange.limit_bytes)
            await self._app(scope, exchange.receive, exchange.send)
        except ApiError as error:
            await shaped(error, scope)(scope, receive, exchange.send)
        finally:
            if (let_go := state.pop(LET_GO, None)) is not None:
                let_go()
            service = self._service
            if (tracing := service.tracing) is not None:
                tracing.note(scope, exchange.status, service.model_name, service.stories)
            if exchange.status:
                if protected:  # probes and pages would hide the share of errors
                    self._service.metrics.on_response(exchange.status)
                    if exchange.status >= 400:
                        self._note_rejection(scope, exchange)
                level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
                took_ms = (time.perf_counter() - received_s) * 1e3
                log.log(
                    level, "%s %s %d %.1f ms %s %s", scope["method"], scope["path"], exchange.status, took_ms,
                    state["caller"].name, state.get("call_id", ""),
                )  # fmt: skip

    def _note_rejection(self, scope: Scope, exchange: "_Exchange") -> None:
        """What was refused before the engine saw it; the rest has a story, and 499 is the client's own end."""
        state, service = scope["state"], self._service
        if exchange.status == 499 or scope["method"] != "POST":
            return
        if not service.stories.of_call(state.get("call_id", "")):
            caller = None if exchange.status == 401 else state["caller"].name
            took_s = time.perf_counter() - state["received_s"]
            service.rejections.note(
                Rejection(
                    state["received_s"], took_s, scope["path"], exchange.status, caller, exchange.refusal
                )
            )

    def _check(self, scope: Scope, limit_bytes: int) -> None:
        service = self._service
        if service.draining and scope["method"] == "POST":
            raise ApiError(
                503,
                "the server is shutting down and takes no new requests",
                code="draining",
                retry_after_s=5,
                headers={"Connection": "close"},
            )
        caller: Caller | None = scope.get(CALLER_KEY, service.anyone)
        if service.keys is not None and CALLER_KEY not in scope:
            caller = service.keys.caller_of(shown_key(Headers(scope=scope)))
            if caller is None:
                raise no_entry("this API key is not valid here")
        assert caller is not None
        scope["state"]["caller"] = caller
        if scope["method"] == "POST":
            service.limits.charge_request(caller)
        for name, value in scope["headers"]:  # as they come: quicker than through Headers
            if name == b"content-length":
                if value.isdigit() and int(value) > limit_bytes:
                    raise too_large(limit_bytes)
                break


def _limit_bytes(service: Service, scope: Scope) -> int:
    """The limit of the body. A file that is uploaded goes to disk, not to memory, and has a limit of its own."""
    if scope["path"] == "/v1/files" and Headers(scope=scope).get("content-type", "").startswith("multipart/"):
        return service.options.max_file_bytes + FORM_BYTES
    return service.options.max_body_bytes


def too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than the {limit_bytes:,} bytes this server takes",
        code="request_too_large",
        headers={"Connection": "close"},  # the rest of the body is not wanted
    )


class _Exchange:
    """Watches one request's messages: counts the body, notes the status, adds the request's id."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self.limit_bytes = _limit_bytes(service, scope)
        self._scope, self._receive, self._send = scope, receive, send
        self._bytes = 0
        self.status = 0
        self.refusal = b""  # the beginning of an answer that is an error
        lenient = Headers(scope=scope).get("x-cumulo-lenient", "").strip().lower() in ("1", "true")
        self._notes = warnings.open_notes(service.options.lenient or lenient)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            if self._bytes > self.limit_bytes:
                raise too_large(self.limit_bytes)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if (header := self._notes.header()) is not None:
                message["headers"] = [(warnings.HEADER, header), *message.get("headers", ())]
            call_id = self._scope["state"].get("call_id")
            if call_id is not None:
                headers = message.get("headers", [])
                if not (
                    headers and headers[-1][0] == b"x-request-id"
                ):  # a stream has it already, as its last
                    message["headers"] = [*headers, (b"x-request-id", call_id.encode())]
                if speaks_anthropic(self._scope["path"]):
                    MutableHeaders(scope=message)["request-id"] = call_id  # where Anthropic's clients look
        elif self.status >= 400:
            if len(self.refusal) < MOST_REASON_BYTES:
                self.refusal += message.get("body", b"")[:MOST_REASON_BYTES]
            if self.status == 413 and not message.get("more_body"):
                await self._send({**message, "more_body": True})
                await self._discard_body()
                message = {"type": "http.response.body"}
        await self._send(message)

    async def _discard_body(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                unread_bytes = _DISCARD_BYTES
                while unread_bytes > 0:
                    message = await self._receive()
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
                    unread_bytes -= len(message.get("body", b""))
