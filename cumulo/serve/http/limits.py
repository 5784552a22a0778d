"""HttpLimits: what one connection may send and how long it may take. Made by `_Run` from ServeOptions."""

import logging
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cumulo.errors import CumuloError
from cumulo.serve.options import ServeOptions

log = logging.getLogger(__name__)

_RESERVE = 16  # connections beyond the limit, on which only health, readiness and metrics are answered
_OWN = 128  # descriptors the process may open later: workers, the file of keys, a new engine's sockets
_LEAST_CONNECTIONS = 8
_BURST = 32  # accepted before they are counted: uvloop takes one at a time
FORM_BYTES = 64 << 10  # what surrounds an uploaded file
BACKLOG = 2048  # connections the kernel holds until they are accepted; they need no descriptors of ours


def find_room(wanted_connections: int) -> int:
    """Raise the soft limit of open files as far as needed and allowed; fewer connections where it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/dev/fd").iterdir()))
    needed = opened + _OWN + _RESERVE + wanted_connections + _BURST
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted_connections
    connections = room_within(soft - opened, wanted_connections)
    if connections < wanted_connections:
        log.warning(
            "%d connections are possible instead of %d: the limit of open files is %d; raise it with `ulimit -Hn`",
            connections, wanted_connections, soft,
        )  # fmt: skip
    return connections


def room_within(free_descriptors: int, wanted_connections: int) -> int:
    """What is left when the process, the reserve and a burst of newcomers have theirs."""
    own, burst = min(_OWN, free_descriptors // 4), min(_BURST, free_descriptors // 8)
    connections = min(wanted_connections, free_descriptors - own - burst - _RESERVE)
    if connections < min(wanted_connections, _LEAST_CONNECTIONS):
        raise CumuloError(
            f"only {free_descriptors} more files can be opened, which is too few to serve: raise the limit of open "
            "files, for instance with `ulimit -n 4096`"
        )
    return connections


# A refused or early-answered body is read on so far, so that its sender gets to read the answer.
_DISCARD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    connections: int
    per_address: int  # connections
    header_timeout_s: float
    body_timeout_s: float
    keep_alive_timeout_s: float
    write_timeout_s: float
    body_bytes: int  # on the wire, read or thrown away; beyond, the connection is closed
    reserve: int = _RESERVE  # further connections, for operators
    head_bytes: int = 64 << 10  # request line and all header lines; also of all trailers of a chunked body
    header_line_bytes: int = 16 << 10
    headers: int = 100
    url_bytes: int = 8 << 10
    # Chunk sizes and extensions, beyond what the body allows: a body in chunks of 1 byte has 5 of framing each.
    framing_bytes: int = 64 << 10
    framing_per_body_byte: int = 8
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
        return max(8, self.connections // 4)

    @property
    def sweep_s(self) -> float:
        """Between two looks at all connections: an eighth of the shortest time-out, within bounds."""
        shortest_s = min(
            self.header_timeout_s, self.body_timeout_s, self.keep_alive_timeout_s, self.write_timeout_s
        )
        return min(1.0, max(0.05, shortest_s / 8))


def http_limits(options: ServeOptions, connections: int) -> HttpLimits:
    most_of_one = options.max_connections_per_address or max(1, connections // 2)
    return HttpLimits(
        connections=connections,
        per_address=min(connections, most_of_one),
        header_timeout_s=options.header_timeout_s,
        body_timeout_s=options.body_timeout_s,
        keep_alive_timeout_s=options.keep_alive_timeout_s,
        write_timeout_s=options.write_timeout_s,
        body_bytes=max(options.max_body_bytes, options.max_file_bytes) + _DISCARD_BYTES,
    )
