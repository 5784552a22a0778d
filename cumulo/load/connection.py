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

_MOST_HEADER_BYTES = 1 << 18


class BadResponse(Exception):
    """The bytes are not an HTTP response; the message says where they stop being one."""


class Response:
    """`feed` returns the pieces of the body in the new bytes; `complete` says when there is no more to come."""

    __slots__ = ("_buffer", "_chunked", "_left", "complete", "headers", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0  # 0: the head has not arrived
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = True
        self._buffer = b""
        self._chunked = False
        self._left: int | None = None  # bytes still due of the body or chunk; None: until the connection ends

    def feed(self, data: bytes) -> list[bytes]:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if not self.status:
            rest = self._head(data)
            if rest is None:
                return []
            data = rest
        if self._chunked:
            return self._chunks(data)
        return self._plain(data)

    def end(self) -> None:
        """The connection has ended: the end of an uncounted body, an error inside any other."""
        self.keep_alive = False
        if self.status and not self._chunked and self._left is None:
            self.complete = True

    def _plain(self, data: bytes) -> list[bytes]:
        if self._left is not None:
            if len(data) > self._left:
                raise BadResponse(f"{len(data) - self._left} bytes after the end of the body")
            self._left -= len(data)
            self.complete = self._left == 0
        return [data] if data else []

    def _head(self, data: bytes) -> bytes | None:
        """Read the head; returns what follows it, or None while it is incomplete."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MOST_HEADER_BYTES:
                    raise BadResponse(f"no end of the headers within {_MOST_HEADER_BYTES} bytes")
                if not b"HTTP/1."[: len(data)] == data[:7]:
                    raise BadResponse(f"not an HTTP response: it begins with {data[:40]!r}")
                self._buffer = data
                return None
            lines = data[:end].decode("latin-1").split("\r\n")
            data = data[end + 4 :]
            parts = lines[0].split(" ", 2)
            if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
                raise BadResponse(f"not an HTTP status line: {lines[0][:80]!r}")
            status = int(parts[1])
            if status >= 200:
                break  # 1xx answers announce the real one
        self.status = status
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (parts[0] != "HTTP/1.0" or "keep-alive" in connection)
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._chunked, self._left = True, 0
        elif status in (204, 304):
            self._left, self.complete = 0, True
        elif "content-length" in self.headers:
            if not self.headers["content-length"].isdigit():
                raise BadResponse(f"not a content length: {self.headers['content-length']!r}")
            self._left = int(self.headers["content-length"])
            self.complete = self._left == 0
        return data

    def _chunks(self, data: bytes) -> list[bytes]:
        """Chunks as `size CRLF bytes CRLF`; `_left` counts the bytes still due of the current one, with CRLF."""
        pieces = []
        position, length = 0, len(data)
        left = self._left or 0
        while position < length:
            if left:
                take = min(left, length - position)
                body = min(max(left - 2, 0), take)
                if body:
                    pieces.append(data[position : position + body])
                position += take
                left -= take
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                if length - position > 1024:
                    raise BadResponse("a chunk's size runs on for more than 1024 bytes")
                self._buffer = data[position:]
                break
            size_text = data[position:end].partition(b";")[0].strip()
            try:
                size = int(size_text, 16)
            except ValueError as error:
                raise BadResponse(f"not a chunk size: {size_text[:20]!r}") from error
            if size == 0:
                # Trailers are rare; the body ends with the first empty line from here on.
                trailer = data.find(b"\r\n\r\n", position)
                if trailer < 0:
                    self._buffer = data[position:]
                else:
                    self.complete = True
                break
            position = end + 2
            left = size + 2
        self._left = left
        return pieces


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
