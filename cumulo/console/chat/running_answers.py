"""RunningAnswers: answers that the server is making for the console, whether or not a page is looking.

A page that is closed, reloaded or shows another conversation does not end its answer: the page that comes back
asks for it by its id. Finished answers are kept for a while, in memory only, until the browser has stored them.
"""

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message

from cumulo.console.chat.answer import ChatAnswer


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


_KEPT_S = 3600.0
_MOST_KEPT = 256


class RunningAnswer:
    """One answer and the task that makes it. `version` grows with every event."""

    def __init__(self, owner: str) -> None:
        self.id = secrets.token_hex(12)
        self.owner = owner
        self.answer = ChatAnswer()
        self.done = False
        self.refused = False  # it was never begun: the question can be asked again as it stands
        self.ended_s = 0.0
        self.version = 0
        self._hang_up = asyncio.Event()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # held: a task nobody holds may be collected

    def begin(self, api: ApiCaller, body: dict[str, Any]) -> None:
        self._task = asyncio.create_task(self._run(api, body))

    def stop(self) -> None:
        self._hang_up.set()

    async def news(self, seen_version: int) -> None:
        """Wait until there is more than what was seen."""
        while self.version == seen_version and not self.done:
            await self._news.wait()

    async def _run(self, api: ApiCaller, body: dict[str, Any]) -> None:
        try:
            async for event in api.stream("/v1/chat/completions", body, self._hang_up):
                self.answer.add_event(event)
                self._tell()
        except ApiFailure as failure:
            self.answer.problem = str(failure)
            self.refused = self.answer.said_nothing
        except Exception:
            self.answer.problem = "the server failed on this request; its log says more"
            raise
        finally:
            self.done, self.ended_s = True, time.monotonic()
            self._tell()

    def _tell(self) -> None:
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()


class RunningAnswers:
    def __init__(self) -> None:
        self._answers: OrderedDict[str, RunningAnswer] = OrderedDict()

    def begin(self, owner: str, api: ApiCaller, body: dict[str, Any]) -> RunningAnswer:
        self._forget_old()
        running = RunningAnswer(owner)
        self._answers[running.id] = running
        running.begin(api, body)
        return running

    def get(self, owner: str, answer_id: str) -> RunningAnswer | None:
        running = self._answers.get(answer_id)
        return running if running is not None and running.owner == owner else None

    def _forget_old(self) -> None:
        now_s = time.monotonic()
        ended = [one for one in self._answers.values() if one.done]
        excess = len(self._answers) - _MOST_KEPT
        for position, one in enumerate(ended):
            if position < excess or now_s - one.ended_s > _KEPT_S:
                del self._answers[one.id]
