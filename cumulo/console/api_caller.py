"""ApiCaller: asks the API from inside its own process. Used by the chat page and RunningAnswers.

The console is a client like any other: its requests pass the same gate, limits and endpoints, without a socket.
Hanging up is what stops an answer, exactly as when a browser or program goes away.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message


class ApiFailure(Exception):
    """The API answered with an error; the message is meant for the person who asked."""


class ApiCaller:
    def __init__(self, app: ASGIApp, key: str | None, host: str = "localhost") -> None:
        """`host`: as the page's own request named it, so that it passes the same check."""
        self._app, self._key, self._host = app, key, host

    async def get(self, path: str) -> dict[str, Any]:
        """What a GET answers, read as JSON."""
        exchange = _Exchange(b"", asyncio.Event())
        await self._call(path, exchange, "GET")
        content = b""
        while (chunk := await exchange.chunks.get()) is not None:
            content += chunk
        if exchange.status >= 400:
            raise ApiFailure(_refusal(content, exchange.status))
        answer: dict[str, Any] = json.loads(content)
        return answer

    async def stream(
        self, path: str, body: dict[str, Any], hang_up: asyncio.Event
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer. Ends early, without an error, once `hang_up` is set."""
        exchange = _Exchange(json.dumps(body).encode(), hang_up)
        task = asyncio.create_task(self._call(path, exchange))
        try:
            while (chunk := await exchange.chunks.get()) is not None:
                if exchange.status >= 400:
                    raise ApiFailure(_refusal(chunk, exchange.status))
                for line in chunk.split(b"\n\n"):
                    content = line.removeprefix(b"data: ")
                    if line.startswith(b"data: ") and content != b"[DONE]":
                        event = json.loads(content)
                        if "error" in event:
                            raise ApiFailure(_message(event))
                        yield event
        finally:
            hang_up.set()
            await asyncio.wait([task])
        await task  # a bug in the endpoint is not swallowed

    async def _call(self, path: str, exchange: "_Exchange", method: str = "POST") -> None:
        headers = [(b"content-type", b"application/json"), (b"host", self._host.encode("latin-1"))]
        if self._key is not None:
            headers.append((b"authorization", f"Bearer {self._key}".encode()))
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "client": ("console", 0), "server": ("console", 0),
        }  # fmt: skip
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.chunks.put_nowait(None)


class _Exchange:
    def __init__(self, body: bytes, hang_up: asyncio.Event) -> None:
        self._body: bytes | None = body
        self._hang_up = hang_up
        self.status = 0
        self.chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.chunks.put_nowait(message["body"])


def _refusal(content: bytes, status: int) -> str:
    try:
        return _message(json.loads(content))
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"


def _message(event: dict[str, Any]) -> str:
    return str(event["error"]["message"])
