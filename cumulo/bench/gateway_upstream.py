"""A server that costs next to nothing, in a process of its own: what the gateway is measured in front of. Started
by `gateway.py` as `python -m cumulo.bench.gateway_upstream TOKENS GAP_S`; prints its port.

It speaks to a gateway as a Cumulo server does: it tells its state, and seals its streams.
"""

import asyncio
import sys

from cumulo import __version__
from cumulo.fleet.wire import PROMPT_HEADER, STATE_TYPE, FleetIdentity, FleetNews, PromptTold, written
from cumulo.serve.http.listening import loop_factory

MODEL = "canned"
_TELL_S = 0.4
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
_running = 0


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: int, gap_s: float
) -> None:
    global _running
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get /internal"):
                await _tell_state(writer)
            await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
            sealed = b"x-cumulo-fleet-key" in head
            _running += 1
            writer.write(_HEAD)
            for number in range(1, tokens + 1):
                writer.write(_chunk(_EVENT % number + (b": %d\n\n" % number if sealed else b"")))
                await asyncio.sleep(gap_s)
            writer.write(_chunk(_DONE + (b": end 0\n\n" if sealed else b"")) + b"0\r\n\r\n")
            _running -= 1
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the gateway has gone
    finally:
        writer.close()


async def _tell_state(writer: asyncio.StreamWriter) -> None:
    """What a gateway hears of a server, until it goes."""
    writer.write(_STATE_HEAD + _chunk(written(FleetNews(identity=_IDENTITY, reset=True)) + b"\n"))
    while True:
        await asyncio.sleep(_TELL_S)
        writer.write(_chunk(written(FleetNews(running=_running)) + b"\n"))
        await writer.drain()


async def _main(tokens: int, gap_s: float) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: _serve(reader, writer, tokens, gap_s), "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_main(int(sys.argv[1]), float(sys.argv[2])))
