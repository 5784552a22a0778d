"""RunningAnswers: answers that the server is making for the console, whether or not a page is looking.

A page that is closed, reloaded or shows another conversation does not end its answer: the page that comes back
asks for it by its id. Finished answers are kept for a while, in memory only, until the browser has stored them.
"""

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message

from cumulo.console.chat.answer import ChatAnswer


class ApiFailure(Exception):
    """The API answered with an error; the message is meant for the person who asked."""


class ApiCaller:
    def __init__(self, app: ASGIApp, key: str | None, host: str = "localhost") -> None:
        """`host`: as the page's own request named it, so that it passes the same check."""
        self._app, self._key, self._host = app, key, host

    async def stream(
        self, path: str, body: dict[str, Any], hang_up: asyncio.Event
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer. Ends early, without an error, once `hang_up` is set."""
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        messages: list[Message] = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]
        status = 0

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await hang_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message.get("body"):
                chunks.put_nowait(message["body"])

        async def call() -> None:
            try:
                await self._app(self._scope(path), receive, send)
            finally:
                chunks.put_nowait(None)

        task = asyncio.create_task(call())
        try:
            while (chunk := await chunks.get()) is not None or status >= 400:
                if hang_up.is_set() and status >= 400:  # stopped before it began: there is nothing to tell
                    return
                if chunk is None or status >= 400:
                    raise ApiFailure(_refusal(chunk or b"", status))
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

    def _scope(self, path: str) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"host", self._host.encode("latin-1"))]
        if self._key is not None:
            headers.append((b"authorization", f"Bearer {self._key}".encode()))
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "client": ("console", 0), "server": ("console", 0),
        }  # fmt: skip


def _refusal(content: bytes, status: int) -> str:
    try:
        return _message(json.loads(content))
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"


def _message(event: dict[str, Any]) -> str:
    return str(event["error"]["message"])


FindMessages = Callable[[], Awaitable[list[dict[str, Any]]]]
_KEPT_S = 3600.0
_MOST_KEPT = 256


class RunningAnswer:
    """One answer and the task that makes it. `version` grows with every event."""

    def __init__(
        self,
        owner: str,
        api: ApiCaller,
        body: dict[str, Any],
        messages: FindMessages | None,
        answer: ChatAnswer | None,
    ) -> None:
        self.id = secrets.token_hex(12)
        self.owner = owner
        self.answer = answer or ChatAnswer()
        self.done = False
        self.refused = False  # it was never begun: the question can be asked again as it stands
        self.ended_s = 0.0
        self.version = 0
        self._hang_up = asyncio.Event()
        self._news = asyncio.Event()
        # Held: a task nobody holds may be collected.
        self._task = asyncio.create_task(self._run(api, body, messages))

    def stop(self) -> None:
        self._hang_up.set()

    async def news(self, seen_version: int) -> None:
        """Wait until there is more than what was seen."""
        while self.version == seen_version and not self.done:
            await self._news.wait()

    async def _run(self, api: ApiCaller, body: dict[str, Any], messages: FindMessages | None) -> None:
        try:
            if messages is not None:
                body = body | {"messages": await messages()}
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

    def begin(
        self, owner: str, api: ApiCaller, body: dict[str, Any], messages: FindMessages | None = None,
        answer: ChatAnswer | None = None,
    ) -> RunningAnswer:  # fmt: skip
        """`messages`: finds those of the request, where that takes a while. `answer`: the one to continue."""
        self._forget_old()
        running = RunningAnswer(owner, api, body, messages, answer)
        self._answers[running.id] = running
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
