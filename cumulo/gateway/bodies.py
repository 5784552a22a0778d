"""Bodies of requests: held whole where a request may have to be sent again, within bounds for each key and in all;
passed on piece by piece where a file is uploaded."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.types import Receive, Scope

from cumulo.serve.access.keys import Caller
from cumulo.serve.errors import ApiError, ClientGone

MOST_FILE_BYTES = 128 << 20
_UPLOAD_BYTES = 512 << 10  # of buffers while a file passes: at most so much waits on both sides together


def is_upload(scope: Scope) -> bool:
    return (scope["method"], scope["path"]) == ("POST", "/v1/files")


class Bodies:
    """What all running requests hold together."""

    def __init__(self, most_body_bytes: int, most_held_bytes: int, has_keys: bool) -> None:
        self._most_body_bytes, self._most_bytes = most_body_bytes, most_held_bytes
        self._most_bytes_of_one = most_held_bytes // 2 if has_keys else most_held_bytes
        self._held_bytes: Counter[str] = Counter()  # by caller

    @contextmanager
    def open(self, caller: Caller) -> Iterator["HeldBody"]:
        """Everything that is read of one request; it counts until the request has ended."""
        body = HeldBody(self, caller.name, self._most_body_bytes)
        try:
            yield body
        finally:
            self._held_bytes[caller.name] -= body.held_bytes
            self._held_bytes += Counter()  # names of zero go

    def take_room(self, name: str, size: int) -> None:
        """Raises ApiError where there is no room."""
        if self._held_bytes[name] + size > self._most_bytes_of_one:
            raise _later(429, f"the requests of this key hold {self._most_bytes_of_one:,} bytes already")
        if self._held_bytes.total() + size > self._most_bytes:
            raise _later(503, f"the requests of this gateway hold {self._most_bytes:,} bytes already")
        self._held_bytes[name] += size


class HeldBody:
    def __init__(self, room: Bodies, name: str, most_bytes: int) -> None:
        self._room, self._name, self._most_bytes = room, name, most_bytes
        self.held_bytes = 0

    def _take(self, size: int) -> None:
        self._room.take_room(self._name, size)
        self.held_bytes += size

    async def whole(self, receive: Receive) -> bytes:
        """Raises ApiError, or ClientGone."""
        pieces = list[bytes]()
        async for piece in _pieces(receive, self._most_bytes):
            self._take(len(piece))
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def upload(self, scope: Scope, receive: Receive) -> tuple[tuple[bytes, bytes], AsyncIterator[bytes]]:
        """The header that says how long the body is, and the body as it goes over the wire. Raises ApiError."""
        self._take(_UPLOAD_BYTES)
        for name, value in scope["headers"]:
            if name == b"content-length":
                if value.isdigit() and int(value) > MOST_FILE_BYTES:
                    raise _too_large(MOST_FILE_BYTES)
                return (name, value), _pieces(receive, MOST_FILE_BYTES)
        return (b"transfer-encoding", b"chunked"), _chunks(_pieces(receive, MOST_FILE_BYTES))


async def _pieces(receive: Receive, most_bytes: int) -> AsyncIterator[bytes]:
    more, size = True, 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        more, piece = message.get("more_body", False), message.get("body", b"")
        size += len(piece)
        if size > most_bytes:
            raise _too_large(most_bytes)
        if piece:
            yield piece


async def _chunks(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def _too_large(most_bytes: int) -> ApiError:
    message = f"the body is larger than the {most_bytes:,} bytes this gateway takes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _later(status: int, message: str) -> ApiError:
    return ApiError(
        status,
        f"{message}: send this one when others have ended",
        code="too_many_bytes",
        retry_after_s=1,
        headers={"Connection": "close"},
    )
