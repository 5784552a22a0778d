"""One request to the server's own application, without a socket. Called by the runner for every line of a batch.

It takes the way of any other request: gate, limits, endpoint, errors. What it need not do is to show a key: whose
it is stands in the scope, where no client can write. It goes after every request that somebody waits for.
"""

import asyncio
import logging
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from cumulo.serve.access.keys import CALLER_KEY, Caller
from cumulo.serve.call import LEAST_PRIORITY_KEY
from cumulo.serve.errors import ApiError

log = logging.getLogger(__name__)

BATCH_PRIORITY = 100  # the least important there is


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(app: ASGIApp, path: str, body: bytes, caller: Caller, stop: asyncio.Event) -> Answer:
    """POST `body`. `stop`: the one who asked has gone; the engine is told to end it."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {LEAST_PRIORITY_KEY: BATCH_PRIORITY},
        CALLER_KEY: caller,
    }
    sent = False
    status, headers, pieces = 500, dict[str, str](), list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await stop.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        elif message["type"] == "http.response.body":
            pieces.append(bytes(message.get("body", b"")))

    try:
        await app(scope, receive, send)
    except Exception:
        # Starlette answers 500, then raises for the log of a server around it; ours has been written already.
        if not headers:
            log.exception("a batch's request to %s failed", path)
            return Answer(
                500, {}, ApiError(500, "the server failed on this request; its log says more").body()
            )
    return Answer(status, headers, b"".join(pieces))
