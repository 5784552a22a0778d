"""A small real HTTP server that streams OpenAI-shaped answers at a known pace, and misbehaves when told to.

It logs when it wrote what, on the clock the generator uses too, so that measured latencies can be checked
against the truth.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Behaviour:
    """How one request is answered."""

    kind: str = "good"
    first_s: float = 0.0
    gap_s: float = 0.0
    retry_after: str | None = None
    pieces: int | None = None  # for "cut": after so many
    tokens_per_chunk: int = 1
    after_requests: int = 0  # answers when so many have arrived


@dataclass
class Seen:
    """What the server knows of one request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    arrived_s: float
    wrote_s: list[float] = field(default_factory=list)
    text: str = ""
    ended_s: float = 0.0
    aborted: bool = False
    connection: int = 0


class ToyServer:
    """Runs in a thread of its own while the `with` block lasts."""

    def __init__(
        self,
        behave: Callable[[int, dict[str, Any]], Behaviour] = lambda number, body: Behaviour(),
        slots: int = 10_000,
        refuse: tuple[str, ...] = (),
        usage: bool = True,
        template_tokens: int = 7,
    ) -> None:
        self.behave = behave
        self.slots = slots
        self.refuse = refuse
        self.usage = usage
        self.template_tokens = template_tokens
        self.seen: list[Seen] = []
        self.connections = 0
        self.close_after_answer = False
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ToyServer":
        self._thread.start()
        assert self._ready.wait(300)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def measured(self) -> list[Seen]:
        """Without the probe's requests, whose answers are two tokens."""
        return [seen for seen in self.seen if seen.body.get("max_tokens") != 2]

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._free = asyncio.Semaphore(self.slots)
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines[1:])}
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
                if method == "GET":
                    self._plain(writer, 200, {"data": [{"id": "toy-model"}]})
                    continue
                seen = Seen(path, headers, body, time.monotonic(), connection=connection)
                self.seen.append(seen)
                refused = [name for name in self.refuse if name in body]
                if refused:
                    message = f"{refused[0]} is not supported"
                    self._plain(writer, 400, {"error": {"message": message, "type": "invalid_request_error"}})
                    continue
                behaviour = self.behave(len(self.measured) - 1, body)
                async with self._free:
                    await self._answer(writer, seen, behaviour)
                seen.ended_s = time.monotonic()
                if self.close_after_answer or behaviour.kind in ("cut", "reset", "http/1.0"):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            if self.seen:
                self.seen[-1].aborted = True
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()

    @staticmethod
    def _plain(writer: asyncio.StreamWriter, status: int, body: object, extra: str = "") -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}{extra}\r\n".encode() + data)

    async def _answer(self, writer: asyncio.StreamWriter, seen: Seen, behaviour: Behaviour) -> None:
        match behaviour.kind:
            case "hang":
                await asyncio.sleep(30)
            case "reset":
                assert writer.transport is not None
                writer.transport.abort()
            case "not http":
                writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            case "json":
                self._plain(writer, 200, {"choices": [{"message": {"content": "not streamed"}}]})
            case "429" | "500" | "503":
                extra = f"Retry-After: {behaviour.retry_after}\r\n" if behaviour.retry_after else ""
                self._plain(writer, int(behaviour.kind), {"error": {"message": "the toy is unwell"}}, extra)
            case _:
                await self._stream(writer, seen, behaviour)

    async def _stream(self, writer: asyncio.StreamWriter, seen: Seen, behaviour: Behaviour) -> None:
        body, chat = seen.body, "messages" in seen.body
        tokens = 0 if behaviour.kind == "empty" else body.get("max_tokens", body.get("max_completion_tokens"))
        plain = behaviour.kind == "http/1.0"  # neither chunked nor counted: it ends with the connection

        def send(fields: dict[str, Any] | bytes) -> None:
            data = fields if isinstance(fields, bytes) else b"data: " + json.dumps(fields).encode() + b"\n\n"
            writer.write(data if plain else b"%x\r\n%b\r\n" % (len(data), data))

        def chunk(text: str | None, finish: str | None = None) -> dict[str, Any]:
            content = {"delta": {"content": text} if text else {}} if chat else {"text": text or ""}
            kind = "chat.completion.chunk" if chat else "text_completion"
            choice = {"index": 0, "finish_reason": finish} | content
            return {"id": "toy", "object": kind, "created": 1, "model": "toy-model", "choices": [choice]}

        version, coding = ("1.0", "") if plain else ("1.1", "Transfer-Encoding: chunked\r\n")
        writer.write(f"HTTP/{version} 200 OK\r\nContent-Type: text/event-stream\r\n{coding}\r\n".encode())
        if chat:
            opening = chunk(None)
            opening["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            send(opening)
        await asyncio.sleep(behaviour.first_s)
        while len(self.seen) < behaviour.after_requests:
            await asyncio.sleep(0.005)
        per_chunk = behaviour.tokens_per_chunk
        for number in range(0, tokens, per_chunk):
            if number:
                await asyncio.sleep(behaviour.gap_s)
            if behaviour.pieces is not None and number >= behaviour.pieces:
                if behaviour.kind == "cut":
                    return
                if behaviour.kind == "malformed":
                    send(b'data: {"choices": [{"delta"\n\n')
                    break
                if behaviour.kind == "error event":
                    send({"error": {"message": "the engine died", "type": "server_error"}})
                    break
                if behaviour.kind == "no end":
                    writer.write(b"0\r\n\r\n")
                    return
            seen.wrote_s.append(time.monotonic())
            text = f"w{number} " * min(per_chunk, tokens - number)
            seen.text += text
            send(chunk(text))
            await writer.drain()
        send(chunk(None, "length"))
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            texts = [m["content"] for m in body["messages"]] if chat else [body["prompt"]]
            prompt = self.template_tokens + sum(len(text.split()) for text in texts)
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
            send(chunk(None) | {"choices": [], "usage": usage})
        send(b"data: [DONE]\n\n")
        if not plain:
            writer.write(b"0\r\n\r\n")
