"""GatewayAccess: authenticates a gateway by the fleet's key, as ASGI middleware in front of the gate.

A request with the right proof may say who it is for, get an id and a seed, have its stream sealed, or be resumed. A
wrong proof is refused, and so is everything under /internal/ without one.
"""

import logging
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cumulo.fleet.wire import (
    ASK_HEADER,
    PROMPT_HEADER,
    PROOF_HEADER,
    RESUME_PATH,
    FleetAsk,
    FleetKey,
    NoProof,
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
        self._key = None if key is None else FleetKey(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        proof = ask = None
        for name, value in scope["headers"]:
            if name == PROOF_HEADER:
                proof = value
            elif name == ASK_HEADER:
                ask = value
        if proof is None and not scope["path"].startswith("/internal/"):
            await self._app(scope, receive, send)
            return
        try:
            answer = self._check(scope, proof, ask)
            if ask is not None:
                receive = await self._let_in(scope, receive, ask)
            send = _telling(scope, send, self._service, answer)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, proof: bytes | None, ask: bytes | None) -> bytes:
        """Returns this server's proof."""
        if self._key is None:
            raise _refused(
                "this server has no fleet key: start it with --fleet-key-file FILE, the same file as the gateway's"
            )
        if proof is None:
            raise _refused("paths under /internal/ are for the fleet's gateway: they need the fleet's key")
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        try:
            self._key.check(proof, scope["method"], target, ask or b"")
        except NoProof as error:
            raise _refused(str(error)) from None
        return self._key.answer(proof)

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


def _telling(scope: Scope, send: Send, service: Service, proof: bytes) -> Send:
    """Adds the server's proof to the answer's headers, and what is known of the prompt."""

    async def send_told(message: Message) -> None:
        if message["type"] == "http.response.start":
            state = scope.get("state", {})
            forwarded: ForwardedRequest | None = state.get(FORWARDED)
            # Before the others: whoever looks for the request's id looks at the last.
            message["headers"] = [(PROOF_HEADER, proof), *message.get("headers", ())]
            if forwarded is not None and forwarded.prompt is not None:
                records = service.stories.of_call(state.get("call_id", ""))
                stories = [record.story for record in records]
                cached = sum(story.cached_tokens for story in stories if story is not None)
                known = bool(stories) and None not in stories
                told = msgspec.structs.replace(forwarded.prompt, cached=cached if known else None)
                message["headers"] = [(PROMPT_HEADER, written(told)), *message["headers"]]
        await send(message)

    return send_told
