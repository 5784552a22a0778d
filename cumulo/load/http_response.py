"""An HTTP/1.1 response out of a byte stream that arrives in arbitrary pieces. Pure; fed by `connection.py`.

Knows what a client needs to know: status, headers, and a body that is counted, chunked or runs to the end.
"""

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
