"""What a gateway reads of a request: a file passes through it, all else is held within bounds."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from cumulo.gateway.bodies import Bodies
from cumulo.serve.access.keys import Caller, new_key
from cumulo.serve.errors import ApiError
from tests.gateway.canned_upstream import HEAD, gateway_before

PIECE = b"x" * (1 << 16)
NO = b"HTTP/1.1 413 No\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize("sized", [True, False])
def test_an_upload_that_is_refused_early_is_not_read_to_its_end(sized: bool) -> None:
    pieces, read = 1024, 0

    async def file() -> AsyncIterator[bytes]:
        nonlocal read
        for read in range(pieces):  # noqa: B007
            yield PIECE

    async def play() -> httpx.Response:
        headers = {"content-length": str(pieces * len(PIECE))} if sized else {}
        async with gateway_before(lambda head, _: NO, reads=False) as client:
            return await client.post("/v1/files", content=file(), headers=headers)

    assert asyncio.run(play()).status_code == 413
    assert read < pieces // 2


def test_an_upload_arrives_as_it_was_sent() -> None:
    async def file() -> AsyncIterator[bytes]:
        for number in range(64):
            yield PIECE + b"%d" % number

    async def play() -> httpx.Response:
        def answer(_: bytes, body: bytes) -> bytes:
            told = json.dumps({"bytes": len(body), "end": body[-2:].decode()}).encode()
            return HEAD + b"content-length: %d\r\n\r\n%b" % (len(told), told)

        length = sum(len(PIECE) + len(str(number)) for number in range(64))
        async with gateway_before(answer) as client:
            return await client.post("/v1/files", content=file(), headers={"content-length": str(length)})

    found = asyncio.run(play()).json()
    assert found == {"bytes": 64 * len(PIECE) + 10 + 2 * 54, "end": "63"}


def test_an_upload_that_is_too_large_is_refused_before_a_replica_is_asked() -> None:
    async def play() -> httpx.Response:
        async with gateway_before(lambda *_: b"") as client:
            return await client.post("/v1/files", content=b"{}", headers={"content-length": str(1 << 40)})

    assert asyncio.run(play()).status_code == 413


def test_bodies_have_room_for_each_key_and_in_all() -> None:
    room = Bodies(most_body_bytes=100, most_held_bytes=100, has_keys=True)

    async def receive(size: int) -> dict[str, object]:
        return {"type": "http.request", "body": b"x" * size}

    async def read(name: str, size: int) -> int:
        with room.open(Caller(name)) as held:
            try:
                return len(await held.whole(lambda: receive(size)))  # type: ignore[arg-type,return-value]
            except ApiError as error:
                return error.status

    async def play() -> None:
        with room.open(Caller("ann")) as held:
            assert len(await held.whole(lambda: receive(40))) == 40  # type: ignore[arg-type,return-value]
            assert await read("ann", 11) == 429
            assert await read("bob", 50) == 50
            with room.open(Caller("bob")) as other:
                await other.whole(lambda: receive(45))  # type: ignore[arg-type,return-value]
                assert await read("eve", 16) == 503
        assert await read("ann", 50) == 50
        assert await read("ann", 101) == 413

    asyncio.run(play())


def test_bodies_of_a_key_are_refused_while_others_of_it_run(tmp_path: Path) -> None:
    keys = {name: new_key(tmp_path / "keys.json", name) for name in ("ann", "bob")}
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 3000}]}

    async def play() -> list[int]:
        gate = asyncio.Event()
        statuses: list[int] = []

        async def ask(client: httpx.AsyncClient, name: str) -> None:
            shown = {"Authorization": f"Bearer {keys[name]}"}
            found = await client.post("/v1/chat/completions", json=body, headers=shown)
            statuses.append(found.status_code)
            gate.set()

        options = {"api_keys": tmp_path / "keys.json", "max_held_bytes": 10_000}
        async with gateway_before(lambda *_: b"", **options) as client:
            waiting = asyncio.create_task(ask(client, "ann"))  # no answer comes to it
            refused = [asyncio.create_task(ask(client, "ann")) for _ in range(2)]
            await asyncio.wait_for(gate.wait(), 60)
            for task in (waiting, *refused):
                task.cancel()
        return statuses

    assert asyncio.run(play())[0] == 429
