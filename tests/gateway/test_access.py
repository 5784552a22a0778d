"""Who learns what from a gateway: replicas no keys, callers nothing of each other, operators everything."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cumulo.serve.access.keys import new_key
from tests.gateway.canned_upstream import HEAD, gateway_before

FLEET_KEY, OPERATOR = "the-fleets-own-key", "the-operators-own-key"
ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
_number = 0


def answer(head: bytes, body: bytes) -> bytes:
    global _number
    _number += 1
    return HEAD + b"x-request-id: chatcmpl-%024d\r\ncontent-length: 2\r\n\r\n{}" % _number


def played(play: Callable[[httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with gateway_before(answer, **options) as client:
            await play(client)

    asyncio.run(run())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
def test_another_server_gets_no_key_that_the_gateway_knows(tmp_path: Path, header: str) -> None:
    key, seen = new_key(tmp_path / "keys.json", "ann"), list[bytes]()

    async def play(client: httpx.AsyncClient) -> None:
        shown = key if header == "X-Api-Key" else f"Bearer {key}"
        assert (await client.post("/v1/chat/completions", json=ASK, headers={header: shown})).is_success

    played(play, seen=seen, api_keys=tmp_path / "keys.json", fleet_key=FLEET_KEY, operator_key=OPERATOR)
    told = b"".join(seen)
    assert b"post /v1/chat" in told and b"get /internal/fleet/state" in told
    for secret in (key, FLEET_KEY, OPERATOR):
        assert secret.lower().encode() not in told
    assert b"x-cumulo-fleet:" not in told


def test_keys_that_the_gateway_does_not_check_reach_the_server_that_does() -> None:
    seen = list[bytes]()

    async def play(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/chat/completions", json=ASK, headers=bearer("mine"))).is_success

    played(play, seen=seen)
    assert b"authorization: bearer mine" in b"".join(seen)


@pytest.mark.parametrize("has_keys", [True, False])
def test_callers_see_their_own_requests_and_operators_all(tmp_path: Path, has_keys: bool) -> None:
    names = ("ann", "bob")
    keys = {name: new_key(tmp_path / "keys.json", name) for name in names}

    async def play(client: httpx.AsyncClient) -> None:
        async def recent(key: str) -> list[str]:
            return [
                one["id"] for one in (await client.get("/v1/fleet", headers=bearer(key))).json()["recent"]
            ]

        async def explained(key: str, name: str) -> int:
            return (await client.get(f"/v1/requests/{name}/explain", headers=bearer(key))).status_code

        ids = {}
        for name in names:
            made = await client.post("/v1/chat/completions", json=ASK, headers=bearer(keys[name]))
            ids[name] = made.headers["x-request-id"]
        for name, other in (names, names[::-1]):
            assert await recent(keys[name]) == [ids[name]]
            last = await client.get("/v1/requests/last/explain", headers=bearer(keys[name]))
            assert last.json()["gateway"]["id"] == ids[name]
            assert await explained(keys[name], ids[other]) == 404
        assert await recent(OPERATOR) == [ids["bob"], ids["ann"]]
        assert await explained(OPERATOR, "last") == 200
        stranger = await client.get("/v1/fleet")
        assert stranger.status_code == 401 if has_keys else stranger.json()["recent"] == []

    played(play, api_keys=tmp_path / "keys.json" if has_keys else None, operator_key=OPERATOR)


def test_the_fleets_key_is_no_operators_key(tmp_path: Path) -> None:
    async def play(client: httpx.AsyncClient) -> None:
        for key in ("", FLEET_KEY):
            door = await client.post("/v1/fleet/replicas/x/drain", headers=bearer(key))
            assert door.status_code == 403 and "--operator-key-file" in door.text

    played(play, fleet_key=FLEET_KEY)


def test_an_api_key_that_may_operate_drains_replicas(tmp_path: Path) -> None:
    keys = [new_key(tmp_path / "keys.json", name, may_operate=name == "boss") for name in ("boss", "ann")]

    async def play(client: httpx.AsyncClient) -> None:
        (name,) = [
            one["name"] for one in (await client.get("/v1/fleet", headers=bearer(keys[0]))).json()["replicas"]
        ]
        doors = [
            await client.post(f"/v1/fleet/replicas/{name}/drain", headers=bearer(key)) for key in keys[::-1]
        ]
        assert [door.status_code for door in doors] == [401, 200]

    played(play, api_keys=tmp_path / "keys.json")
