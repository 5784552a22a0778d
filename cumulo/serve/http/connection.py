"""Connection: uvicorn's HTTP protocol with limits on what a client may send and how long it may take.

One per TCP connection; uvicorn makes them, the Keeper decides which may stay. Uvicorn bounds connections and their
idle time only, and the parser (httptools) bounds nothing: it collects a header until its line ends, and tells
nobody. So bytes are counted here: those of a header that does not end, and those around a body that are not the
body. Requests of a connection are answered one at a time: one that is sent before the answer to the one before it
ends the connection behind that answer, as HTTP allows. No client library sends such requests.
"""

import asyncio
import enum
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cumulo.serve.errors import ApiError
from cumulo.serve.http import refusals
from cumulo.serve.http.keeper import Keeper


class Reading(enum.Enum):
    """What the client is to send next."""

    FIRST_BYTE = "sent nothing"
    HEAD = "half a header"
    BODY = "half a body"
    DONE = "whole request"
    NEXT = "idle after a request"
    NOTHING = "refused"


# Answered on the connections of the reserve, for those who must know how the server is.
FOR_OPERATORS = (b"/health", b"/ready", b"/metrics")
_LINGER_S = 2.0  # after an error's answer: to let a client that still sends read it
_LINGER_BYTES = 1 << 20


class _Refused(Exception):
    """Raised in the parser's callbacks; `problem` says why."""


class Connection(HttpToolsProtocol):
    address: str
    reserved: bool

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        keeper: Keeper,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._keeper, self._limits = keeper, keeper.limits
        self._reading = Reading.FIRST_BYTE
        self.answered = False  # has a request of this connection had its answer?
        self._head_bytes = 0  # of the blocks of input after the one in which the present header began
        self._body_bytes = 0  # of the present body, without its framing
        self._wire_bytes = 0  # of the present body, with it, in the blocks after the one in which it began
        self.headers, self.url = [], b""
        self._discarded_bytes = 0
        self._since_s = self._progress_s = 0.0  # on the keeper's clock
        # When the write buffer was first seen, and its size then.
        self._stalled: tuple[float, int] | None = None
        self._problem: refusals.Refusal | None = None
        self._next = b""  # the beginning of a request that came between an answer's last byte and its end

    # -- the connection -----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since_s = self._keeper.clock_s
        self._keeper.admit(self, self.client[0] if self.client else "")
        self._keeper.waiting(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeper.release(self)
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        """Whether a request, of which the header has been read, has not had all of its answer."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.disconnected

    @property
    def _has_sent_all(self) -> bool:
        """Whether the client has the whole answer: an application may end it later than it sends its last byte."""
        cycle = self.cycle
        length = 0 if self.scope["method"] == "HEAD" else cycle.expected_content_length
        return cycle.response_started and not cycle.chunked_encoding and not length

    def data_received(self, data: bytes) -> None:
        if self._answering and self._reading is Reading.DONE and self._has_sent_all:
            self._next += data
            self.flow.pause_reading()
            return
        if self._reading is Reading.NOTHING:
            self._discard(len(data))
            return
        in_body = self._reading is Reading.BODY
        if in_body:
            self._wire_bytes += len(data)
        else:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._upgrade()
        except httptools.HttpParserError:
            self._refuse(self._problem or refusals.MALFORMED)
        else:
            if self._reading is not Reading.DONE:
                self._check_unfinished(in_body)

    def _check_unfinished(self, in_body: bool) -> None:
        """What came did not complete a request: is it not too much already?"""
        self._keeper.waiting(self)
        if self._reading is not Reading.BODY:
            if self._head_bytes > self._limits.head_bytes:
                self._refuse(refusals.HEADER_TOO_LARGE)
        elif in_body:
            self._progress_s = self._keeper.clock_s
            self._check_body()

    def _check_body(self) -> None:
        limits, body_bytes = self._limits, self._body_bytes
        framing_bytes = self._wire_bytes - body_bytes
        if framing_bytes > limits.framing_bytes + limits.framing_per_body_byte * body_bytes:
            self._refuse(refusals.TOO_MUCH_FRAMING)
        elif body_bytes > limits.body_bytes:
            self._refuse(refusals.BODY_TOO_LARGE)

    # -- what the parser reports --------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._head_bytes = Reading.HEAD, 0
        self._since_s = self._keeper.clock_s
        self._keeper.busy(self)  # if the request is not whole, it waits from now on

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._limits.url_bytes:
            self._fail(refusals.URL_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for trailers, which go into a list of their own: they were not there when all was checked."""
        if len(self.headers) >= self._limits.headers:
            self._fail(refusals.HEADER_TOO_LARGE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._limits.exceeded_by(self.headers):
            self._fail(refusals.HEADER_TOO_LARGE)
        if self.reserved and not self._may_come_in():
            self._fail(refusals.TOO_MANY_CONNECTIONS)
        if self._answering:
            self._fail(refusals.PIPELINED)
        earlier = self.cycle
        super().on_headers_complete()
        if self.cycle is not earlier:  # it is no WebSocket's
            if self.scope["http_version"] == "1.0":
                send_plainly(self.cycle)
            self.headers = []
        self._reading = Reading.BODY
        self._since_s = self._progress_s = self._keeper.clock_s
        self._body_bytes = self._wire_bytes = 0

    def _may_come_in(self) -> bool:
        path = httptools.parse_url(self.url).path
        return path in FOR_OPERATORS or self._keeper.promote(self)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._answering:
            self._reading = Reading.DONE
            self._keeper.busy(self)
        else:  # it was answered before its end
            self._await_next()

    def on_response_complete(self) -> None:
        """In place of uvicorn's, which sets a timer for every answer."""
        self.server_state.total_requests += 1
        if not self.answered:
            self._keeper.busy(self)  # out of the line of those without an answer
            self.answered = True
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._reading is Reading.DONE:
            self._await_next()
        else:
            if self._reading is Reading.HEAD:
                self._since_s = self._keeper.clock_s
            self._keeper.waiting(self)
        if self._next:
            begun, self._next = self._next, b""
            self.data_received(begun)

    def _await_next(self) -> None:
        self._reading, self._head_bytes = Reading.NEXT, 0
        self._since_s = self._keeper.clock_s
        self._keeper.waiting(self)

    def _lose_client(self) -> None:
        """Whoever answers is told that nobody waits for it any more."""
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    # -- sockets ------------------------------------------------------------------------------------------
    def _upgrade(self) -> None:
        if not self._should_upgrade():
            # The request is answered as if it had not asked, but what follows it cannot be told from its body.
            self._keeper.tally.note("upgrade", "an upgrade that is not possible was asked for")
            self._end_after_answer()
        elif self._keeper.take_socket(self):
            self.handle_websocket_upgrade()
            self._end_bad_handshake(self.transport.get_protocol())
        else:
            self._refuse(refusals.TOO_MANY_SOCKETS)

    def _end_bad_handshake(self, protocol: Any) -> None:
        """Uvicorn would leave it open and unanswered, and fail on it when the server ends."""
        if protocol.conn.handshake_exc is not None:
            protocol.close_sent = True
            self._say(self._note(refusals.BAD_HANDSHAKE))
            self.transport.close()

    # -- ends ---------------------------------------------------------------------------------------------
    def _fail(self, refusal: refusals.Refusal) -> None:
        self._problem = refusal
        raise _Refused

    def _note(self, refusal: refusals.Refusal) -> ApiError:
        error = refusal.error(self._limits)
        self._keeper.tally.note(refusal.reason, "%s; closing %s", error.message, self.describe())
        return error

    def _refuse(self, refusal: refusals.Refusal) -> None:
        """Answer with the error where that is possible, and end the connection."""
        error = self._note(refusal)
        if self._owes_answer():
            self._end_after_answer()
            return
        told = self._has_begun_answer()
        self._lose_client()
        self._reading = Reading.NOTHING
        if told or self.transport.is_closing():
            self.transport.abort()
        else:
            self._say(error)
            self._since_s = self._keeper.clock_s
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()  # and read on for a while: a close would make the client lose the answer

    def _owes_answer(self) -> bool:
        """Is a whole request being answered? If not, it is the client's turn."""
        return self._answering and self._reading is not Reading.BODY

    def _has_begun_answer(self) -> bool:
        """Whether the client has a part of the answer to the request that it still sends."""
        return self._reading is Reading.BODY and self.cycle is not None and self.cycle.response_started

    def _end_after_answer(self) -> None:
        """The request that is being answered still gets its answer; then the connection ends."""
        self._reading = Reading.NOTHING
        self.cycle.keep_alive = False

    def _say(self, error: ApiError) -> None:
        self.transport.write(refusals.written(error, self.server_state.default_headers))

    def _discard(self, length: int) -> None:
        self._discarded_bytes += length
        if self._discarded_bytes > _LINGER_BYTES and not self._answering:
            self.transport.abort()

    def give_way(self) -> None:
        """Called by the Keeper, which needs the place. Only a waiting connection is asked to."""
        if self._reading in (Reading.HEAD, Reading.BODY) and not self._has_begun_answer():
            self._say(ApiError(503, "the server needs this connection's place", retry_after_s=2))
        self._lose_client()
        self._reading = Reading.NOTHING
        self._since_s = self._keeper.clock_s
        self.transport.close()

    def shutdown(self) -> None:
        if self._reading is Reading.NOTHING and not self._answering:
            self.transport.abort()
        else:
            super().shutdown()

    def describe(self) -> str:
        """How the log names this connection."""
        return f"a connection from {self.address} ({self._reading.value})"

    # -- time-outs ----------------------------------------------------------------------------------------
    def check(self, now_s: float, step_s: float) -> None:
        """Called by the Keeper every second or so; `step_s` has passed since."""
        if self.transport.is_closing() or self.flow.write_paused:
            if self._is_stalled(now_s):
                self._keeper.tally.note("write_timeout", "an answer is not read; closing %s", self.describe())
                self.transport.abort()
            return
        self._stalled = None
        limits, reading, waited_s = self._limits, self._reading, now_s - self._since_s
        if self._owes_answer():
            return
        if reading is Reading.NOTHING:
            if waited_s > _LINGER_S:
                self.transport.abort()
        elif reading is Reading.HEAD:
            if waited_s > limits.header_timeout_s:
                self._refuse(refusals.HEADER_TOO_SLOW)
        elif reading is Reading.FIRST_BYTE:
            if waited_s > limits.header_timeout_s:
                self._keeper.tally.note("header_timeout", "closing %s", self.describe())
                self.transport.close()
        elif reading is Reading.NEXT:
            if waited_s > limits.keep_alive_timeout_s:
                self._keeper.tally.count("keep_alive_timeout")
                self.transport.close()
        elif self.flow.read_paused:  # it is not the client who is slow
            self._since_s += step_s
            self._progress_s = now_s
        else:
            too_slow = waited_s > limits.body_timeout_s + self._body_bytes / limits.least_bytes_s
            if too_slow or now_s - self._progress_s > limits.body_timeout_s:
                self._refuse(refusals.BODY_TOO_SLOW)

    def resume_writing(self) -> None:
        self._stalled = None
        super().resume_writing()

    def _is_stalled(self, now_s: float) -> bool:
        """Does the write buffer shrink too slowly?"""
        patience_s = self._limits.write_timeout_s
        if self._reading is Reading.NOTHING and not self._answering:
            patience_s = min(patience_s, _LINGER_S)
        size_bytes = self.transport.get_write_buffer_size()
        if self._stalled is None or size_bytes > self._stalled[1]:
            self._stalled = now_s, size_bytes  # once it grows, the count begins anew
        since_s, first_bytes = self._stalled
        return now_s - since_s > patience_s + (first_bytes - size_bytes) / self._limits.least_bytes_s


def send_plainly(cycle: RequestResponseCycle) -> None:
    """From now on this request's answer has no chunks. Called before its application runs."""
    send, measured = cycle.send, True

    async def send_plain(message: Any) -> None:
        nonlocal measured
        if message["type"] == "http.response.start":
            measured = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not measured:
                cycle.chunked_encoding = cycle.keep_alive = False
        elif not measured:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
