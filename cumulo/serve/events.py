"""EventStream: a response of server-sent events. Written for one thing: a token's way to the client is short.

What was made while the connection was busy is sent in one write. An error after the first byte is an event
of its own, as OpenAI's client expects it; before the first byte it is an ordinary error response.
"""

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cumulo.serve.call import Call
from cumulo.serve.errors import ApiError, ClientGone

log = logging.getLogger(__name__)

_to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_to_json(content), status, headers, "application/json")


def event(content: Any) -> bytes:
    return b"data: " + _to_json(content) + b"\n\n"


async def open_stream(call: Call, events: AsyncGenerator[bytes, None]) -> Response:
    """Wait for the first event, so that what fails before it has a status of its own."""
    try:
        first = await anext(events)
    except BaseException:
        call.close()
        raise
    return EventStream(call, first, events)


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, call: Call, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": call.id}
        )
        del self.headers["content-length"]
        self._call, self._first, self._events = call, first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._all()) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            pass
        finally:
            self._call.close()

    async def _all(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        try:
            async for chunk in self._events:
                yield chunk
        except ApiError as error:
            yield b"data: " + error.body() + b"\n\n"
        except ClientGone:
            raise
        except Exception:
            log.exception("the stream of %s failed", self._call.id)
            yield b"data: " + ApiError(500, "the server failed on this request").body() + b"\n\n"
