"""Which names of the server are answered, and which web pages may send to it."""

import asyncio
from typing import Any

import pytest

from cumulo.serve.http.host_check import AllowedHosts, HostCheck
from cumulo.serve.http.keeper import Tally

LOCAL = AllowedHosts("127.0.0.1", [])
EVERY = AllowedHosts("0.0.0.0", ["Models.Example.org"])


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "127.9.9.9", "localhost", "LocalHost:1", "localhost.", "[::1]:80"]
)
def test_this_machine_is_answered(host: str) -> None:
    assert host.encode() in LOCAL and host.encode() in EVERY


@pytest.mark.parametrize(
    "host",
    ["evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "evil.com@localhost",
     "localhost,evil.com", "localhost/evil.com", "", "*", "127.1", "[::1", "localhost:x", "locälhost"],
)  # fmt: skip
def test_others_are_not(host: str) -> None:
    assert host.encode("latin-1") not in LOCAL and host.encode("latin-1") not in EVERY


def test_a_server_on_the_network_answers_addresses_and_the_names_allowed() -> None:
    for host in (b"10.1.2.3:8000", b"[fe80::1]", b"models.example.org", b"MODELS.example.org:443"):
        assert host in EVERY and host not in LOCAL
    assert b"anything" in AllowedHosts("127.0.0.1", ["*"])
    assert b"inside.lan" in AllowedHosts("inside.lan", [])


@pytest.mark.parametrize(
    ("method", "origin", "status"),
    [
        ("GET", "http://evil.com", 200),
        ("POST", "http://evil.com", 403),
        ("DELETE", "null", 403),
        ("POST", "http://localhost:8000", 200),
        ("POST", "http://localhost:3000", 403),
        ("POST", "https://good.example", 200),
        ("websocket", "http://evil.com", 403),
        ("websocket", "http://localhost:8000", 200),
    ],
)
def test_pages_of_other_sites_may_not_send(method: str, origin: str, status: int) -> None:
    assert ask(method, [(b"host", b"localhost:8000"), (b"origin", origin.encode())]) == status


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", [], 400), ("1.1", [b"localhost", b"localhost"], 400), ("1.0", [], 200), ("1.0", [b"a", b"b"], 400),
     ("1.1", [b"evil.com"], 421)],
)  # fmt: skip
def test_a_request_has_one_host(version: str, hosts: list[bytes], status: int) -> None:
    assert ask("GET", [(b"host", host) for host in hosts], version) == status


def ask(method: str, headers: list[tuple[bytes, bytes]], version: str = "1.1") -> int:
    """The status of the answer; 200 from the application."""
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        statuses.append(200)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"].endswith("http.response.start"):
            statuses.append(message["status"])

    scope = {"type": "websocket", "extensions": {"websocket.http.response": {}}}
    if method != "websocket":
        scope = {"type": "http", "method": method}
    check = HostCheck(app, LOCAL, ["https://good.example"], Tally(lambda reason: None))
    asyncio.run(check({**scope, "headers": headers, "http_version": version}, receive, send))
    return statuses[0]
