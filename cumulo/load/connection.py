"""The HTTP client of the load generator and of the gateway: connections to one server, kept and reused, with one
request at a time on each.

A protocol object rather than asyncio's streams: the bytes of a token are parsed in the very callback that delivers
them, with no task to wake, which is what makes thousands of tokens per second cheap.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import cast
from urllib.parse import urlsplit

from cumulo.errors import CumuloError

try:
    import httptools
except ImportError:  # commands that talk to no server do without
    httptools = None  # type: ignore[assignment]

_MOST_HEADER_BYTES = 1 << 18
_MOST_BYTES = 16 << 20  # of an answer that is read whole
_PAUSE_BYTES = 1 << 18  # of an answer that nobody has taken yet: no more is read of it
_DEAD_ON_ARRIVAL_S = 0.25


class BadResponse(Exception):
    """The bytes are not an HTTP response."""


class UpstreamError(Exception):
    """The server did not answer, or not to the end. `sent`: it may have begun to work on the request. `status`: of
    the answer that had begun, or 0."""

    def __init__(self, reason: str, *, sent: bool = True, status: int = 0) -> None:
        super().__init__(reason)
        self.sent, self.status = sent, status


class NoHttp(UpstreamError):
    """The server's address does not answer as a web server does."""


class Response:
    """`feed` returns the pieces of the body in the new bytes; `complete` says when there is no more to come."""

    def __init__(self) -> None:
        self.status = 0  # 0: the head has not arrived
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = True
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        self._pieces = []
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadResponse(f"{error} in {data[:40]!r}") from error
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEADER_BYTES:
                raise BadResponse(f"no end of the headers within {_MOST_HEADER_BYTES} bytes")
        return self._pieces

    def end(self) -> None:
        """The connection has ended: the end of an uncounted body, an error inside any other."""
        self.keep_alive = False
        if self.status and not self.headers.keys() & {"content-length", "transfer-encoding"}:
            self.complete = True

    # -- what the parser reports --------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        if self.complete:
            raise BadResponse("bytes came after the end of the body")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # afterwards it is a trailer
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status > 599:
            raise BadResponse(f"there is no status {status}")
        if status >= 200:
            self.status, self.keep_alive = status, self._parser.should_keep_alive()
        else:
            self.headers.clear()  # 1xx answers announce the real one

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = self.status > 0


OnBody = Callable[[Response, bytes, float], None]  # the response so far, a piece of its body, when it came


class UpstreamExchange:
    """One request on one connection, and its answer as far as it has come. The body goes to `on_body` as it comes,
    or waits for `next_pieces`."""

    def __init__(self, connection: "ClientConnection", on_body: OnBody | None) -> None:
        self._connection, self._on_body = connection, on_body
        self.response = Response()
        self.error: Exception | None = None
        self.heard_s = time.monotonic()  # when its last byte came
        self.is_sent = True  # false while a body is passed on that came later than the header
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        """No more will come than what has."""
        return self.response.complete or self.error is not None

    async def send(self, pieces: AsyncIterator[bytes]) -> None:
        """The request's body, no faster than the server takes it; it ends early when the answer has come."""
        self.is_sent = False
        async for piece in pieces:
            if self.over:
                return
            self.heard_s = time.monotonic()
            await self._connection.write(piece)
        self.is_sent = True

    async def head(self) -> Response:
        """Wait for status and headers; raises UpstreamError."""
        while not self.response.status:
            if self.error is not None:
                raise self.error
            await self._wait()
        return self.response

    async def ended(self) -> Response:
        """Wait until all of the answer has come; raises UpstreamError, or what `on_body` raised."""
        while not self.over:
            await self._wait()
        if self.error is not None:
            raise self.error
        return self.response

    async def next_pieces(self) -> list[bytes]:
        """What has come of the body since the last time, waiting for it; empty at the end. What came before an
        error comes before it is raised."""
        while not self._pieces:
            if self.error is not None:
                raise self.error
            if self.response.complete:
                return []
            await self._wait()
        pieces, self._pieces = self._pieces, []
        if self._held_bytes > _PAUSE_BYTES:
            self._connection.resume()
        self._held_bytes = 0
        return pieces

    async def whole(self, timeout_s: float) -> bytes:
        """The body, when all of it has come, in so much time; raises UpstreamError. Ends the exchange."""
        found, size = list[bytes](), 0
        try:
            async with asyncio.timeout(timeout_s):
                while pieces := await self.next_pieces():
                    found += pieces
                    size += sum(map(len, pieces))
                    if size > _MOST_BYTES:
                        raise UpstreamError(f"its answer is longer than {_MOST_BYTES:,} bytes")
        except TimeoutError:
            raise UpstreamError(f"it did not answer within {timeout_s:g} s") from None
        finally:
            self.close()
        return b"".join(found)

    def fail(self, error: Exception | str) -> None:
        """Nobody waits for this server any longer."""
        if not self.over:
            self._end(UpstreamError(error) if isinstance(error, str) else error)

    def close(self) -> None:
        """No more is wanted of it."""
        self._connection.end_exchange(self)

    # -- what the connection brings -----------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        try:
            pieces = self.response.feed(data)
        except BadResponse as error:
            self._end(NoHttp(f"its answer is not an HTTP response: {error}"))
            return
        if self._on_body is not None:
            try:
                for piece in pieces:
                    self._on_body(self.response, piece, self.heard_s)
            except Exception as error:
                self._end(error)  # whoever waits for this answer gets it, also if all of the answer has come
                return
            if not self.response.complete:
                return
        else:
            self._pieces += pieces
            self._held_bytes += sum(map(len, pieces))
            if self._held_bytes > _PAUSE_BYTES:
                self._connection.pause()
        self._news.set()

    def lose(self, reason: str) -> None:
        self.response.end()
        if not self.over:
            self.error = UpstreamError(reason, status=self.response.status)
        self._news.set()

    def _end(self, error: Exception) -> None:
        self.error = error
        self.close()
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class ClientConnection(asyncio.Protocol):
    """One TCP or TLS connection."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._exchange: UpstreamExchange | None = None
        self._writable = asyncio.Event()
        self.open, self.used = False, False

    def begin(self, request: Iterable[bytes], on_body: OnBody | None) -> UpstreamExchange:
        assert self._transport is not None
        self._exchange = UpstreamExchange(self, on_body)
        self._transport.writelines(request)
        return self._exchange

    def end_exchange(self, exchange: UpstreamExchange) -> None:
        """It is kept where the answer is complete; else what is left of it could be taken for the next one's."""
        if self._exchange is not exchange:
            return
        self._exchange, self.used = None, True
        if exchange.response.complete and exchange.response.keep_alive and exchange.is_sent and self.open:
            self._pool.give_back(self)
        else:
            self.abort()

    async def write(self, data: bytes) -> None:
        if self.open and self._transport is not None:
            self._transport.write(data)
            await self._writable.wait()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def pause(self) -> None:
        if self.open and self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.open and self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self.open = True
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.abort()  # nobody asked
        else:
            self._exchange.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._writable.set()
        self._pool.forget(self)
        if self._exchange is not None:
            self._exchange.lose(
                f"it closed the connection ({error})" if error else "it closed the connection"
            )


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

    def __init__(self, url: str, connect_timeout_s: float | None = None, most_idle: int = 10_000) -> None:
        super().__init__(url)
        if httptools is None:
            raise CumuloError("an HTTP client needs httptools: pip install -e '.[serve]' in Cumulo's folder")
        self._connect_timeout_s, self._most_idle = connect_timeout_s, most_idle
        self._idle: dict[ClientConnection, None] = {}  # in the order in which they became idle

    async def begin(self, request: Iterable[bytes], on_body: OnBody | None = None) -> UpstreamExchange:
        """Send a request; raises UpstreamError. A kept connection that died meanwhile is replaced unnoticed: that
        shows at once in `connection_lost`, before it is taken."""
        return (await self._take()).begin(request, on_body)

    async def exchange(self, request: bytes, on_body: OnBody) -> Response:
        """Send a request and wait for the end of its answer. A kept connection that the server closed while the
        request was on its way is replaced unnoticed, too."""
        while True:
            connection = await self._take()
            reused, exchange = connection.used, connection.begin([request], on_body)
            sent_s = exchange.heard_s
            try:
                return await exchange.ended()
            except UpstreamError as error:
                # That shows at once, and the request was not looked at.
                if not reused or error.status or time.monotonic() - sent_s >= _DEAD_ON_ARRIVAL_S:
                    raise
            finally:
                exchange.close()

    async def _take(self) -> ClientConnection:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: ClientConnection(self), self.host, self.port, ssl=self.tls
                )
        except (OSError, UnicodeError) as error:  # the latter: of what cannot be a host's name
            reason = getattr(error, "strerror", None) or str(error)  # asyncio's own time-out has no words
            reason = reason or f"it did not come within {self._connect_timeout_s:g} s"
            raise UpstreamError(f"no connection: {reason}", sent=False) from error
        return connection

    def give_back(self, connection: ClientConnection) -> None:
        if len(self._idle) < self._most_idle:
            self._idle[connection] = None
        else:
            connection.abort()

    def forget(self, connection: ClientConnection) -> None:
        self._idle.pop(connection, None)

    def close(self) -> None:
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    def request(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes | None = b""
    ) -> list[bytes]:
        """A request as bytes. Without a body (None) it comes later, and the headers say how."""
        head = [f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host_header}\r\n".encode("latin-1")]
        head += [b"%s: %s\r\n" % pair for pair in headers]
        if body or (body is not None and method not in ("GET", "HEAD", "DELETE")):
            head.append(b"content-length: %d\r\n" % len(body))
        return [b"".join([*head, b"\r\n"]), body] if body else [b"".join([*head, b"\r\n"])]
