"""A server that costs next to nothing, in a process of its own: what the gateway is measured in front of. Started
by `gateway.py` as `python -m cumulo.bench.gateway_upstream TOKENS GAP_S`; prints its port.

It speaks to a gateway as a Cumulo server does: it tells its state, and seals its streams. All streams get their
tokens from one timer.
"""

import asyncio
import re
import sys
import time

from cumulo import __version__
from cumulo.fleet.wire import PROMPT_HEADER, STATE_TYPE, FleetIdentity, FleetNews, PromptTold, written
from cumulo.serve.http.listening import loop_factory

MODEL = "canned"
_IDENTITY = FleetIdentity(__version__, MODEL, "canned", "canned", 16, 8192, 4096)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    + PROMPT_HEADER + b": " + written(PromptTold(64)) + b"\r\ntransfer-encoding: chunked\r\n\r\n"
)  # fmt: skip
_STATE_HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: {STATE_TYPE}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1760000000,'
    b'"model":"canned","choices":[{"index":0,"delta":{"content":" %d"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


class _Client(asyncio.Protocol):
    def __init__(self, server: "_CannedServer") -> None:
        self._server = server
        self._request = b""
        self.sent = 0
        self.sealed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._server.streams.discard(self)
        self._server.watchers.discard(self)

    def data_received(self, data: bytes) -> None:
        self._request += data
        head, blank, rest = self._request.partition(b"\r\n\r\n")
        if not blank:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if len(rest) < length:
            return
        self._request = b""
        if lines[0].startswith(b"get /internal"):
            news = written(FleetNews(identity=_IDENTITY, reset=True)) + b"\n"
            self.transport.write(_STATE_HEAD + _chunk(news))
            self._server.watchers.add(self)
            return
        # A resumed stream goes on behind the tokens that its client has.
        ids = re.match(rb'\{"path":"[^"]*","ids":\[([\d,]+)\]', rest)
        self.sent = ids[1].count(b",") + 1 if ids else 0
        self.sealed = b"x-cumulo-fleet-key" in head.lower()
        self._server.streams.add(self)
        self.step(self._server.tokens, _HEAD)

    def _next(self) -> bytes:
        self.sent += 1
        body = _EVENT % self.sent
        return _chunk(body + b": %d\n\n" % self.sent if self.sealed else body)

    def step(self, tokens: int, before: bytes = b"") -> None:
        if self.sent < tokens:
            self.transport.write(before + self._next())
        else:
            self.transport.write(
                before + _chunk(_DONE + b": end 0\n\n" if self.sealed else _DONE) + b"0\r\n\r\n"
            )
            self._server.streams.discard(self)


class _CannedServer:
    def __init__(self, tokens: int, gap_s: float) -> None:
        self.tokens, self._gap_s = tokens, gap_s
        self.streams: set[_Client] = set()
        self.watchers: set[_Client] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Client(self), "127.0.0.1", 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        told_s = 0.0
        while True:
            # Streams are served in slices, so that they do not all speak at the same moment.
            for part in range(10):
                await asyncio.sleep(self._gap_s / 10)
                for client in list(self.streams):
                    if hash(client) // 64 % 10 == part:
                        client.step(self.tokens)
            if time.monotonic() - told_s > 0.4:
                told_s = time.monotonic()
                for client in self.watchers:
                    client.transport.write(_chunk(written(FleetNews(running=len(self.streams))) + b"\n"))


def main() -> None:
    tokens, gap_s = int(sys.argv[1]), float(sys.argv[2])
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_CannedServer(tokens, gap_s).run())


if __name__ == "__main__":
    main()
