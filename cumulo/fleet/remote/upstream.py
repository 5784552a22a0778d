"""Connections to one replica, kept and reused. What an answer brings goes to an UpstreamExchange in the very
callback that delivers it: no task is woken between a replica's byte and the buffer of its client.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import cast

from cumulo.load.connection import BadResponse, Response, ServerAddress

_MOST_IDLE = 256
_MOST_BYTES = 16 << 20  # of what a replica says of itself
_PAUSE_BYTES = 1 << 18  # of an answer that its client has not read yet: no more is read of it


class UpstreamError(Exception):
    """The replica did not answer, or not to the end. `sent`: it may have begun to work on the request."""

    def __init__(self, reason: str, *, sent: bool = True) -> None:
        super().__init__(reason)
        self.sent = sent


class NoHttp(UpstreamError):
    """The replica's address does not answer as a web server does."""


class UpstreamExchange:
    """One request on one connection, and its answer as far as it has come."""

    def __init__(self, connection: "UpstreamConnection") -> None:
        self._connection = connection
        self.response = Response()
        self.error: UpstreamError | None = None
        self.heard_s = time.monotonic()  # when its last byte came
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """No more will come than what has."""
        return self.response.complete or self.error is not None

    async def head(self) -> Response:
        """Wait for status and headers; raises UpstreamError."""
        while not self.response.status:
            if self.error is not None:
                raise self.error
            await self._wait()
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

    def fail(self, reason: str, kind: type[UpstreamError] = UpstreamError) -> None:
        """Nobody waits for this replica any longer."""
        if not self.over:
            self.error = kind(reason)
            self.close()
            self._wake()

    def close(self) -> None:
        """No more is wanted of it."""
        self._connection.end_exchange(self)

    # -- what the connection brings -----------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        pieces = self.response.feed(data)
        self._pieces += pieces
        self._held_bytes += sum(map(len, pieces))
        if self._held_bytes > _PAUSE_BYTES:
            self._connection.pause()
        self._wake()

    def lose(self, reason: str) -> None:
        self.response.end()
        if not self.over:
            self.error = UpstreamError(reason)
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():  # its task may have been cancelled
                self._waiter.set_result(None)
            self._waiter = None


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, upstream: "Upstream") -> None:
        self._upstream = upstream
        self._transport: asyncio.Transport | None = None
        self._exchange: UpstreamExchange | None = None
        self.open, self.used = False, False

    def begin(self, request: Iterable[bytes]) -> UpstreamExchange:
        assert self._transport is not None
        self._exchange = UpstreamExchange(self)
        self._transport.writelines(request)
        return self._exchange

    def end_exchange(self, exchange: UpstreamExchange) -> None:
        """It is kept where the answer is complete; else what is left of it could be taken for the next one's."""
        if self._exchange is not exchange:
            return
        self._exchange, self.used = None, True
        if exchange.response.complete and exchange.response.keep_alive and self.open:
            self._upstream.give_back(self)
        else:
            self.abort()

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

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.abort()  # nobody asked
            return
        try:
            exchange.feed(data)
        except BadResponse as error:
            exchange.fail(f"its answer is no HTTP: {error}", NoHttp)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._upstream.forget(self)
        if self._exchange is not None:
            self._exchange.lose(
                f"it closed the connection ({error})" if error else "it closed the connection"
            )


class Upstream:
    """The connections to one replica."""

    def __init__(self, url: str, connect_timeout_s: float = 2.0) -> None:
        self.address = ServerAddress(url)
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[UpstreamConnection, None] = {}  # in the order in which they became idle

    async def begin(self, request: Iterable[bytes]) -> UpstreamExchange:
        """Send a request; raises UpstreamError. A kept connection that died meanwhile is replaced unnoticed: that
        shows at once in `connection_lost`, before it is taken."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.open:
                return connection.begin(request)
        return (await self._connect()).begin(request)

    async def _connect(self) -> UpstreamConnection:
        address, loop = self.address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), address.host, address.port, ssl=address.tls
                )
        except TimeoutError:
            reason = f"no connection within {self._connect_timeout_s:g} s"
            raise UpstreamError(reason, sent=False) from None
        except (OSError, UnicodeError) as error:  # the latter: of what cannot be a host's name
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise UpstreamError(f"no connection: {reason}", sent=False) from None
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle[connection] = None
        else:
            connection.abort()

    def forget(self, connection: UpstreamConnection) -> None:
        self._idle.pop(connection, None)

    def close(self) -> None:
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    # -- requests as bytes ------------------------------------------------------------------------------------
    def request(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes = b""
    ) -> list[bytes]:
        head = [
            f"{method} {self.address.path}{path} HTTP/1.1\r\nHost: {self.address.host_header}\r\n".encode(
                "latin-1"
            )
        ]
        head += [b"%s: %s\r\n" % pair for pair in headers]
        if body or method not in ("GET", "HEAD", "DELETE"):
            head.append(b"content-length: %d\r\n" % len(body))
        return [b"".join([*head, b"\r\n"]), body] if body else [b"".join([*head, b"\r\n"])]
