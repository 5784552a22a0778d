"""A server that answers at once with canned chunks, in a process of its own: what the generator is measured
against. Called by `self_test.py` as `python -m cumulo.load.canned_server`; prints its port.

Every chunk is a write of its own, as a real server's would be, and carries the moment it was written.
"""

import asyncio
import json
import sys
import time

MODEL = "canned"


def _event(fields: dict[str, object]) -> bytes:
    body = b"data: " + json.dumps(fields).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(body), body)


def _chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, object]:
    """A chunk as long as those of real servers."""
    return {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_760_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }


ROLE = _event(_chunk({"role": "assistant", "content": ""}))
BEFORE, AFTER = (part for part in json.dumps(_chunk({"content": "WORD"})).encode().split(b"WORD"))
LAST = _event(_chunk({}, "length"))
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _token(now_s: float) -> bytes:
    body = b"data: %b %.6f%b\n\n" % (BEFORE, now_s, AFTER)
    return b"%x\r\n%b\r\n" % (len(body), body)


async def _stream(writer: asyncio.StreamWriter, tokens: int, prompt_tokens: int, gap_s: float) -> None:
    """`gap_s` 0: as fast as the other side takes them."""
    writer.write(HEAD + ROLE)
    loop = asyncio.get_running_loop()
    next_s = loop.time() + gap_s
    for _ in range(tokens):
        if gap_s:
            await asyncio.sleep(next_s - loop.time())
            next_s += gap_s
        else:
            await asyncio.sleep(0)  # one write each: the next token's is another turn of the loop
        writer.write(_token(time.monotonic()))
        await writer.drain()
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }
    writer.write(LAST + _event(_chunk({}) | {"choices": [], "usage": usage}) + DONE)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get"):
                body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                continue
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            asked = json.loads(await reader.readexactly(length))
            words = sum(len(message["content"].split()) for message in asked["messages"])
            await _stream(writer, asked["max_tokens"], words, asked.get("gap_s", 0.0))
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        pass  # the client has gone, or the program ends
    finally:
        writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    # The parent holds our standard input: when it goes, so do we.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(_main())
