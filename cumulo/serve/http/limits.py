"""HttpLimits: what one connection may send and how long it may take. Made by `_Run` from ServeOptions."""

from collections.abc import Sequence
from dataclasses import dataclass

from cumulo.serve.http.descriptors import Room
from cumulo.serve.options import ServeOptions

# A refused or early-answered body is read on so far, so that its sender gets to read the answer.
_DISCARD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    room: Room
    per_address: int  # connections
    header_timeout_s: float
    body_timeout_s: float
    keep_alive_timeout_s: float
    write_timeout_s: float
    body_bytes: int  # on the wire, read or thrown away; beyond, the connection is closed
    head_bytes: int = 64 << 10  # request line and all header lines; also of all trailers of a chunked body
    header_line_bytes: int = 16 << 10
    headers: int = 100
    url_bytes: int = 8 << 10
    # A stretch of input that completes nothing: half a header line, a chunk extension, empty lines.
    silent_bytes: int = 64 << 10
    # Chunk sizes and extensions, beyond what the body allows: a body in chunks of 1 byte has 5 of framing each.
    framing_bytes: int = 64 << 10
    framing_per_body_byte: int = 8
    pipelined: int = 16  # requests that wait behind the one that is answered, on one connection
    # After the first `body_timeout_s` a body must come, and after `write_timeout_s` an answer must be taken, at
    # this pace on average.
    least_bytes_s: float = 4096.0

    def exceeded_by(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether these headers or trailers, all complete, are too large."""
        total_bytes = 0
        for name, value in headers:
            line_bytes = len(name) + len(value) + 4
            total_bytes += line_bytes
            if line_bytes > self.header_line_bytes:
                return True
        return total_bytes > self.head_bytes

    @property
    def sockets(self) -> int:
        """WebSockets, which stay open while a page of the console is shown."""
        return max(8, self.room.connections // 4)

    @property
    def sweep_s(self) -> float:
        """Between two looks at all connections: an eighth of the shortest time-out, within bounds."""
        shortest_s = min(
            self.header_timeout_s, self.body_timeout_s, self.keep_alive_timeout_s, self.write_timeout_s
        )
        return min(1.0, max(0.05, shortest_s / 8))


def http_limits(options: ServeOptions, room: Room) -> HttpLimits:
    return HttpLimits(
        room=room,
        per_address=min(
            room.connections, options.max_connections_per_address or max(1, room.connections // 2)
        ),
        header_timeout_s=options.header_timeout_s,
        body_timeout_s=options.body_timeout_s,
        keep_alive_timeout_s=options.keep_alive_timeout_s,
        write_timeout_s=options.write_timeout_s,
        body_bytes=options.max_body_bytes + _DISCARD_BYTES,
    )
