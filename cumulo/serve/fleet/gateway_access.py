"""GatewayAccess: authenticates a gateway by the fleet's key, as ASGI middleware in front of the gate.

A request with the right key may say who it is for, get an id and a seed, have its stream sealed, or be resumed. A
wrong key is refused, and so is everything under /internal/ without one.
"""

import hmac
import logging
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cumulo.fleet.wire import (
    ASK_HEADER,
    KEY_HEADER,
    PROMPT_HEADER,
    RESUME_PATH,
    FleetAsk,
    read_ask,
    read_resume,
    written,
)
from cumulo.serve.access.keys import CALLER_KEY, Caller
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.fleet.forwarded import FORWARDED, ForwardedRequest
from cumulo.serve.service import Service

log = logging.getLogger(__name__)

_TOKENS_BYTES = 64 << 20  # of a resumed answer, its log-probabilities included


class GatewayAccess:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        key = service.options.fleet_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = ask = None
        for name, value in scope["headers"]:
            if name == KEY_HEADER:
                key = value
            elif name == ASK_HEADER:
                ask = value
        if key is None and not scope["path"].startswith("/internal/"):
            await self._app(scope, receive, send)
            return
        try:
            self._check(key)
            if ask is not None:
                receive = await self._let_in(scope, receive, ask)
                send = _telling(scope, send, self._service)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, key: bytes | None) -> None:
        if self._key is None:
            raise _refused(
                "this server has no fleet key: start it with --fleet-key-file FILE, the same file as the gateway's"
            )
        if key is None:
            raise _refused("paths under /internal/ are for the fleet's gateway: they need the fleet's key")
        if not hmac.compare_digest(key, self._key):
            raise _refused(
                "the fleet key is not this server's: start gateway and servers with the same --fleet-key-file"
            )

    async def _let_in(self, scope: Scope, receive: Receive, ask: bytes) -> Receive:
        state: dict[str, Any] = scope.setdefault("state", {})
        try:
            asked: FleetAsk = read_ask(ask)
            resume = None
            if scope["path"] == RESUME_PATH:
                most_bytes = self._service.options.max_body_bytes + _TOKENS_BYTES
                resume = read_resume(await _whole(receive, most_bytes))
                receive = _resumed(scope, resume.path, bytes(resume.body), receive)
            state[FORWARDED] = ForwardedRequest(asked, resume)
        except (msgspec.MsgspecError, ValueError) as error:
            raise invalid(
                f"what the gateway adds cannot be read: {error}; are both of one version?"
            ) from None
        if asked.caller is not None:
            scope[CALLER_KEY] = Caller(**msgspec.structs.asdict(asked.caller))
        return receive


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_fleet_key")


async def _whole(receive: Receive, most_bytes: int) -> bytes:
    pieces, more, size = list[bytes](), True, 0
    while more:
        message = await receive()
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        more = message.get("more_body", False)
        if size > most_bytes:
            raise ApiError(413, "the resumed answer is too large", headers={"Connection": "close"})
    return b"".join(pieces)


def _resumed(scope: Scope, path: str, body: bytes, receive: Receive) -> Receive:
    """Turns a resumed request into the request that was made at first."""
    scope["path"], scope["raw_path"] = path, path.encode()
    headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
    scope["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
    given = False

    async def receive_body() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body


def _telling(scope: Scope, send: Send, service: Service) -> Send:
    """Adds what is known of the prompt to the answer's headers."""

    async def send_told(message: Message) -> None:
        if message["type"] == "http.response.start":
            state = scope["state"]
            forwarded: ForwardedRequest = state[FORWARDED]
            if forwarded.prompt is not None:
                records = service.stories.of_call(state.get("call_id", ""))
                stories = [record.story for record in records]
                cached = sum(story.cached_tokens for story in stories if story is not None)
                known = bool(stories) and None not in stories
                told = msgspec.structs.replace(forwarded.prompt, cached=cached if known else None)
                # Before the others: whoever looks for the request's id looks at the last.
                message["headers"] = [(PROMPT_HEADER, written(told)), *message.get("headers", ())]
        await send(message)

    return send_told
