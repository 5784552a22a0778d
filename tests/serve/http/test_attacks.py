"""Attacks on a real server with few descriptors: it stays small, and others are answered meanwhile."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.http.raw import Client, chunked, get, post
from tests.serve.running_server import RunningServer, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

FLOOD_BYTES = 100 << 20
GROWTH_KIB = 24 << 10
MOST_FILES = 256
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    running = RunningServer(str(model), "--kv-memory-gib", "0.1", most_files=MOST_FILES)
    try:
        yield running
    finally:
        running.end()


def peak_kib(server: RunningServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"X-Header: 0123456789\r\n" * 3000),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Header: ", b"v" * 65536),
        (chunked("/v1/chat/completions") + b"1;", b"e" * 65536),
        (chunked("/v1/chat/completions") + b"2\r\n{}\r\n0\r\n", b"Trailer: 0123456789\r\n" * 3000),
    ],
    ids=["header lines", "header value", "chunk extension", "trailers"],
)
def test_a_flood_is_cut_off_and_costs_no_memory(server: RunningServer, begin: bytes, piece: bytes) -> None:
    server.post("/v1/chat/completions", CHAT).raise_for_status()
    before_kib = peak_kib(server)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(server.url)) for _ in range(3)]
        threads = [threading.Thread(target=flood, args=(client, begin, piece)) for client in clients]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert server.get("/health").status_code == 200
        assert all(client.lost for client in clients), "all was taken"
    assert server.post("/v1/chat/completions", CHAT).status_code == 200
    assert peak_kib(server) - before_kib < GROWTH_KIB


def flood(client: Client, begin: bytes, piece: bytes) -> None:
    client.send(begin)
    client.flood(piece, FLOOD_BYTES)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        post(b"{", "/v1/completions")[:-1].replace(b": 1", b": 9"),
    ],
    ids=["nothing", "half a header", "half a body"],
)
def test_many_connections_keep_nobody_out(server: RunningServer, sent: bytes) -> None:
    evicted = server.sample("cumulo:connections_refused_total", reason="evicted")
    with (
        server.client().chat.completions.create(
            **CHAT | {"max_tokens": 400}, stream=True, extra_body={"ignore_eos": True}
        ) as stream,
        contextlib.ExitStack() as stack,
    ):  # type: ignore[call-overload]
        first = next(iter(stream))
        assert first.choices
        for _ in range(2 * MOST_FILES):
            stack.enter_context(Client(server.url)).send(sent)
        for _ in range(3):
            assert server.get("/health").status_code == 200
            assert server.post("/v1/chat/completions", CHAT).status_code == 200
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.sample("cumulo:connections_refused_total", reason="evicted") > evicted
    wait_for(lambda: server.sample("cumulo:connections") < 20, "the end of the connections", server)
    evictions = server.log.count("evicted: too many connections")
    assert 1 <= evictions < 20  # told, but not one line for each


@pytest.mark.parametrize("path", ["/v1/models", "/", "/docs", "/health", "/metrics", "/openapi.json"])
def test_a_foreign_name_is_refused(server: RunningServer, path: str) -> None:
    """DNS rebinding: a page of evil.com, whose name now points here."""
    with Client(server.url) as client:
        client.send(get(path, "Origin: http://evil.com", host="evil.com"))
        answer = client.answer()
        assert answer is not None and answer.status == 421
        assert "--allow-host evil.com" in answer.error["message"]
        client.send(get(path, host="localhost"))
        own = client.answer()
        assert own is not None and own.status == 200


def test_a_foreign_page_may_not_send(server: RunningServer) -> None:
    foreign = server.post("/v1/chat/completions", CHAT, headers={"Origin": "http://evil.com"})
    assert foreign.status_code == 403 and "--cors-origin" in foreign.json()["error"]["message"]
    assert server.post("/v1/chat/completions", CHAT, headers={"Origin": server.url}).status_code == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("evil.com", "http://evil.com", 421),
        ("127.0.0.1", "http://evil.com", 403),
        ("127.0.0.1", "http://127.0.0.1", 101),
    ],
)
def test_the_consoles_socket_is_for_its_own_pages(
    server: RunningServer, host: str, origin: str, status: int
) -> None:
    pytest.importorskip("nicegui")
    handshake = get(
        "/_nicegui_ws/socket.io/?EIO=4&transport=websocket", "Connection: Upgrade", "Upgrade: websocket",
        "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", f"Origin: {origin}", host=host,
    )  # fmt: skip
    with Client(server.url) as client:
        client.send(handshake)
        answer = client.answer()
        assert answer is not None and answer.status == status


def test_the_log_tells_of_refusals_without_a_flood(server: RunningServer) -> None:
    with Client(server.url) as client:
        for _ in range(100):
            client.send(get(host="evil.com"))
            answer = client.answer()
            assert answer is not None and answer.status == 421
    assert 1 <= server.log.count("host: ") < 20
    assert server.sample("cumulo:connections_refused_total", reason="host") >= 100
