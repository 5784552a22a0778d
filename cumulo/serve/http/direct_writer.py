"""DirectWriter: parts of a streamed answer straight into their connection, from a callback. Used by EventStream.

A task that is woken for every token returns through all middleware to the place where it waits, which takes longer
than everything else that is done for the token. So only the head and the end of an answer are sent by its task, and
the parts for which there is no room at once.
"""

from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CONNECTION = "cumulo.connection"  # in the scope of a request that came over one: its KnownConnection


class KnownConnection(Protocol):
    """What a request may ask of its connection beyond ASGI."""

    def when_gone(self, tell: Callable[[], None]) -> None:
        """Call `tell` once if the client leaves before it has the whole answer, at once if it has left."""
        ...

    def direct_writer(self) -> "DirectWriter | None":
        """For the rest of an answer that has begun; None where its parts need `send`."""
        ...


class DirectWriter:
    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    @property
    def ready(self) -> bool:
        """Whether a part may be written now. If not, `send` knows what to wait for, or that nobody listens."""
        return not (self._flow.write_paused or self._cycle.disconnected or self._cycle.response_complete)

    def write(self, part: bytes) -> None:
        """One chunk of the body, not empty."""
        self._write(b"%x\r\n%b\r\n" % (len(part), part))


def connection_of(scope: Any) -> KnownConnection | None:
    """None: the request was made within this process, or by a test."""
    connection: KnownConnection | None = scope.get(CONNECTION)
    return connection
