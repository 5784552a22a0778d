"""The server's transport with a small application instead of a model: uvicorn, Connection and Keeper are real.

Runs in a thread of the test's process, on a free port, in no time.
"""

import asyncio
import contextlib
import functools
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop

from cumulo.serve.http.connection import Connection
from cumulo.serve.http.keeper import Keeper, Tally
from cumulo.serve.http.limits import HttpLimits

LIMITS = HttpLimits(
    connections=100,
    reserve=4,
    per_address=100,
    header_timeout_s=30,
    body_timeout_s=30,
    keep_alive_timeout_s=30,
    write_timeout_s=30,
    body_bytes=8 << 20,
)


class Transport:
    """`/hold`: answers when `release` is called. `/late`: the answer ends then, after its last
    byte. `/endless`: streams for ever. Anything else: tells what it got."""

    def __init__(self, limits: HttpLimits) -> None:
        self.refused: Counter[str] = Counter()
        self.holding = self.streaming = self.gone = self.sockets = 0
        self._limits = limits
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop
        self._release: asyncio.Event
        self._server: uvicorn.Server
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        assert self._started.wait(60)

    async def _run(self) -> None:
        self._loop, self._release = asyncio.get_running_loop(), asyncio.Event()
        self.keeper = Keeper(self._limits, Tally(lambda reason: self.refused.update([reason])))
        config = uvicorn.Config(
            self._app,
            http=functools.partial(Connection, keeper=self.keeper),  # type: ignore[arg-type]
            lifespan="off",
            interface="asgi3",
            log_config=None,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self.keeper.start()
        self._loop.call_soon(self._started.set)
        await self._server.serve(sockets=[self._listener])
        self.keeper.stop()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            self.sockets += 1
            while (await receive())["type"] != "websocket.disconnect":
                pass
            self.sockets -= 1
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/hold":
            self.holding += 1
            watch = asyncio.ensure_future(receive())
            wait = asyncio.ensure_future(self._release.wait())
            await asyncio.wait([watch, wait], return_when=asyncio.FIRST_COMPLETED)
            self.holding -= 1
            self.gone += watch.done()
            for task in (watch, wait):
                task.cancel()
        told = {"path": scope["path"], "body_bytes": len(body), "headers": len(scope["headers"])}
        answer = json.dumps(told).encode()
        late = scope["path"] == "/late"
        headers = [(b"content-length", str(len(answer)).encode())] if late else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if late:
            await send({"type": "http.response.body", "body": answer, "more_body": True})
            await self._release.wait()
            answer = b""
        if scope["path"] == "/endless":
            await self._stream(receive, send)
        await send({"type": "http.response.body", "body": answer})

    async def _stream(self, receive: Any, send: Any) -> None:
        self.streaming += 1
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(16384), "more_body": True})
            await asyncio.sleep(0)
        self.streaming -= 1

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._release.set)

    def end(self) -> None:
        self.release()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def transport(connections: int = 100, **changed: Any) -> Iterator[Transport]:
    running = Transport(replace(LIMITS, connections=connections, **changed))
    try:
        yield running
    finally:
        running.end()
