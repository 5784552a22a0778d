"""Tokens that are written past the response's task: through a real connection, with a real inbox."""

import asyncio
import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop

from cumulo.engine.outputs import Delta
from cumulo.serve.api.openai.events import EventStream
from cumulo.serve.engine_link.in_flight import Inbox
from cumulo.serve.http.connection import Connection
from cumulo.serve.http.direct_writer import connection_of
from cumulo.serve.http.keeper import Keeper
from cumulo.serve.http.tally import Tally
from tests.serve.http.transport import LIMITS

TOKENS = 300
LONG = "x" * 20_000  # of a few, no connection has room for more


class Asked:
    """What EventStream needs of a Call; an engine that is a task of the same loop."""

    id, passage = "call-1", None

    def __init__(self, text: str) -> None:
        self.inbox, self.complete, self.told_at_once = Inbox(), False, 0
        self.full = threading.Event()  # the connection had no room for a token
        self._engine = asyncio.create_task(self._make(text))

    async def _make(self, text: str) -> None:
        for number in range(TOKENS):
            self.inbox.put_delta(0, Delta("r", 0, f"{number}{text}\n", [number]))
            await asyncio.sleep(0)
        self.inbox.put_delta(0, Delta("r", 0, "end\n", [0], "stop"))

    async def next_batch(self) -> list[tuple[int, Any]]:
        items: list[tuple[int, Any]] = list(await self.inbox.next_items())
        self.complete = items[-1][1].finish_reason is not None
        return items

    def tell_at_once(self, tell: Any) -> None:
        def counting(position: int, delta: Delta) -> bool:
            told = bool(tell(position, delta))
            self.told_at_once += told
            if not told:
                self.full.set()
            return told

        self.inbox.at_once = None if tell is None else counting

    def close(self) -> None:
        self.inbox.at_once = None


class Words:
    """An EventWriter: texts as they are. `breaks_at`: fails at this one."""

    def __init__(self, breaks_at: str) -> None:
        self._breaks_at = breaks_at

    def add(self, batch: list[tuple[int, Delta]]) -> bytes:
        texts = [delta.text for _, delta in batch]
        if self._breaks_at and self._breaks_at in texts:
            raise RuntimeError("cannot be worded")
        return "".join(texts).encode()

    def end(self) -> bytes:
        return b"DONE"


class Server:
    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.left = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # its connections' too
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()

    async def _run(self) -> None:
        keeper = Keeper(LIMITS, Tally(lambda reason: None))
        http: Any = partial(Connection, keeper=keeper)
        config = uvicorn.Config(self._app, http=http, lifespan="off", interface="asgi3", log_config=None)
        self._server = uvicorn.Server(config)
        await self._server.serve(sockets=[self._listener])

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/leave":
            known = connection_of(scope)
            assert known is not None
            known.when_gone(self.left.set)
            await asyncio.to_thread(self.left.wait, 60)
            return
        call = Asked(LONG if scope["path"] == "/long" else "")
        self.asked.append(call)
        writer = Words("7\n" if scope["path"] == "/broken" else "")
        answer = EventStream(call, writer, b"first\n", True)  # type: ignore[arg-type]
        await answer(scope, receive, send)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(Server()) as running:
        yield running


def expected(text: str) -> str:
    return "first\n" + "".join(f"{number}{text}\n" for number in range(TOKENS)) + "end\nDONE"


def test_tokens_written_at_once_arrive_in_order(server: Server) -> None:
    answer = httpx.get(f"http://127.0.0.1:{server.port}/", timeout=60)
    assert answer.text == expected("")
    assert server.asked[-1].told_at_once > TOKENS // 2, "the task was woken for most tokens"


def test_a_client_that_knows_no_chunks_gets_none(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"200" in head and b"connection: close" in head and b"chunked" not in head
    assert body.decode() == expected("")


def test_a_slow_reader_gets_every_token_once(server: Server) -> None:
    earlier = len(server.asked)
    with socket.socket() as connection:
        connection.settimeout(60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(1, socket.MSG_PEEK) and len(server.asked) == earlier + 1
        assert server.asked[-1].full.wait(60), "the connection always had room"
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        received = answer.read()
    assert received.decode() == expected(LONG)


def test_a_token_that_cannot_be_worded_ends_its_own_stream_only(server: Server) -> None:
    answer = httpx.get(f"http://127.0.0.1:{server.port}/broken", timeout=60)
    assert answer.text.startswith("first\n0\n1\n2\n3\n4\n5\n6\ndata: ")
    assert "the server failed on this request" in answer.text


def test_a_client_that_leaves_is_told_of(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /leave HTTP/1.1\r\nHost: a\r\n\r\n")
        assert not server.left.is_set()
    assert server.left.wait(60)
