"""Servers that are no replicas: whatever answers at an address, the gateway says in bounded time and memory what is
wrong with it."""

import asyncio

import pytest

from cumulo.errors import CumuloError
from cumulo.fleet.remote.options import PoolMember
from cumulo.fleet.remote.replicas import Replicas
from cumulo.gateway.options import GatewayOptions
from cumulo.load import connection
from tests.leaping_loop import LeapingLoop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
PAGE = b"<!doctype html><title>Welcome</title>"


def counted(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def joining(answer: bytes, more: bytes = b"", key: str | None = None) -> str:
    """What a gateway says of a server that answers everything like this, and goes on with `more` for ever; whether
    it refuses to start with it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                while more:
                    writer.write(more)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def join() -> str:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            member = PoolMember(f"http://127.0.0.1:{port}")
            fleet = Replicas(GatewayOptions(members=(member,), fleet_key=key, hang_timeout_s=0.3))
            try:
                await asyncio.wait_for(fleet.start(), 60)
                return fleet.replicas[member.url].trouble
            except CumuloError as refused:
                return f"refused: {refused}"
            finally:
                await fleet.close()

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(join())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (HEAD + b"content-length: 9\r\n\r\n{", "did not answer within 0.3 s"),
        (b"HTTP/1.1 200", "had no answer in 0.3 s"),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", "gives status 500"),
        (b"220 mail.example ESMTP\r\n\r\n", "not an HTTP response"),
        (counted(b"[" * 100_000), "not what an OpenAI-compatible server answers"),
        (counted(b'{"data": [5]}'), "not what an OpenAI-compatible server answers"),
        (counted(b'{"data": {"id": "a"}}'), "not what an OpenAI-compatible server answers"),
        (counted(b'\xff\xfe{"data"'), "not what an OpenAI-compatible server answers"),
        (counted(PAGE, b"text/html"), "not what an OpenAI-compatible server answers"),
        (counted(b'{"data": []}'), "name the model with --pool"),
    ],
)
@pytest.mark.parametrize("key", [None, "a-key"])
def test_what_is_no_server_is_refused_with_the_reason(answer: bytes, words: str, key: str | None) -> None:
    found = joining(answer, key=key)
    assert words in found
    # What may be a server's bad moment is waited for; what will never be one is refused.
    assert found.startswith("refused: ") == ("0.3 s" not in words and "500" not in words)


def test_an_answer_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MOST_BYTES", 1 << 16)
    assert "longer than 65,536 bytes" in joining(HEAD + b"\r\n", more=b" " * 4096)


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_what_cannot_be_a_host_is_no_server(host: str) -> None:
    fleet = Replicas(GatewayOptions(members=(PoolMember(f"http://{host}:1"),)))

    async def join() -> str:
        try:
            await fleet.start()
            (replica,) = fleet.replicas.values()
            return replica.trouble
        finally:
            await fleet.close()

    assert "does not answer: no connection: " in asyncio.run(join())


@pytest.mark.parametrize("url", ["http://[::1", "http://a:b:c", "ftp://a", "http://", "http://a:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(CumuloError, match=r"not a server's address|impossible port"):
        PoolMember(url)


def test_a_server_may_be_removed_while_it_is_asked_what_it_is() -> None:
    async def play() -> None:
        async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            fleet = Replicas(GatewayOptions(members=(PoolMember("http://127.0.0.1:1"),), hang_timeout_s=60))
            adding = asyncio.create_task(fleet.add(PoolMember(url)))
            while url not in fleet.replicas:
                await asyncio.sleep(0)
            await fleet.remove(url)
            with pytest.raises(CumuloError, match="was removed while"):
                await adding
            await fleet.close()

    asyncio.run(play())
