"""HTTP connections that are kept and reused: one request at a time on each. Called by `client.py`.

A protocol object rather than asyncio's streams: the bytes of a token are parsed in the very callback that
delivers them, with no task to wake, which is what makes thousands of tokens per second cheap.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from cumulo.errors import CumuloError
from cumulo.load.http_response import BadResponse, Response

_DEAD_ON_ARRIVAL_S = 0.25
OnBody = Callable[[Response, bytes, float], None]  # the response so far, a piece of its body, when it came


class ConnectionLost(Exception):
    """The server closed or reset the connection before its answer was complete."""

    def __init__(self, response: Response, reason: str) -> None:
        super().__init__(reason)
        self.response = response


class ClientConnection(asyncio.Protocol):
    """One TCP or TLS connection. `exchange` sends a request and waits for the end of its response."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._now = loop.time
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[None] | None = None
        self.used = False
        self.open = False

    async def exchange(self, request: bytes, on_body: OnBody) -> Response:
        assert self._transport is not None
        response = Response()
        self._response, self._on_body = response, on_body
        self._done = self._loop.create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._response = self._on_body = self._done = None
            self.used = True
            if not (response.complete and response.keep_alive):
                self.close()  # what is left of the answer must not be taken for the next one's
        return response

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self.open = True

    def data_received(self, data: bytes) -> None:
        response, on_body = self._response, self._on_body
        if response is None or on_body is None:
            self.close()  # nobody asked: a late or confused server
            return
        now_s = self._now()
        try:
            for piece in response.feed(data):
                on_body(response, piece, now_s)
        except Exception as error:  # of the parsers: it belongs to whoever waits for this answer
            self._finish(error)
            return
        if response.complete:
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        response = self._response
        if response is None:
            return
        response.end()
        if response.complete:
            self._finish(None)
        else:
            self._finish(
                ConnectionLost(response, str(error) if error else "the server closed the connection")
            )

    def _finish(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


class ServerAddress:
    """Where a server is, read from its URL."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
        except ValueError as error:
            raise CumuloError(f"{url!r} is not a server's address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CumuloError(f"{url!r} is not a server's address; it should look like http://127.0.0.1:8000")
        try:
            port = parts.port
        except ValueError as error:
            raise CumuloError(f"{url!r} has an impossible port: {error}") from error
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.path = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self.path}"
        self.host_header = parts.netloc.rpartition("@")[2]
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None


class Pool(ServerAddress):
    """Connections to one server, opened as they are needed."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._idle: list[ClientConnection] = []
        self.opened = 0

    async def exchange(self, request: bytes, on_body: OnBody) -> Response:
        """Send on an idle connection or a new one. One that died while idle is replaced unnoticed."""
        loop = asyncio.get_running_loop()
        while True:
            connection = await self._take()
            reused, sent_s = connection.used, loop.time()
            try:
                response = await connection.exchange(request, on_body)
            except ConnectionLost as lost:
                # Closed by the server while idle: that shows at once, and the request was not looked at.
                if reused and not lost.response.status and loop.time() - sent_s < _DEAD_ON_ARRIVAL_S:
                    continue
                raise
            if connection.open:
                self._idle.append(connection)
            return response

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _take(self) -> ClientConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: ClientConnection(loop), self.host, self.port, ssl=self.tls
        )
        self.opened += 1
        return connection


__all__ = ["BadResponse", "ClientConnection", "ConnectionLost", "OnBody", "Pool", "ServerAddress"]
