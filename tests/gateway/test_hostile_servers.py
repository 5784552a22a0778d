"""Answers that a replica may not give: the client of the gateway gets an error that it can read."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.gateway.canned_upstream import HEAD, gateway_before

ASK = {"model": "m", "messages": []}
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def asked(answer: bytes, body: dict[str, Any] = ASK) -> httpx.Response:
    async def play() -> httpx.Response:
        async with asyncio.timeout(60), gateway_before(lambda *_: answer) as client:
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(play())


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"transfer-encoding: chunked\r\n\r\n-6\r\nabcdef\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"content-length: -2\r\n\r\n{}",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"x-value: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"bad name: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 700 Odd\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
def test_an_answer_that_is_not_http_becomes_a_502_with_the_reason(answer: bytes) -> None:
    found = asked(answer)
    assert found.status_code == 502
    assert "not an HTTP response" in found.json()["error"]["message"]


def test_what_only_gateways_write_is_nothing_to_clients_of_another_server() -> None:
    found = asked(HEAD + b"x-cumulo-prompt: \xff{\r\ncontent-length: 2\r\n\r\n{}")
    assert (found.status_code, found.json()) == (200, {})


def test_a_stream_that_breaks_the_protocol_ends_with_an_error_event() -> None:
    begun = EVENTS + b"transfer-encoding: chunked\r\n\r\nb\r\ndata: {}\n\n \r\n"
    found = asked(begun + b"-6\r\nabcdef\r\n", {**ASK, "stream": True})
    assert found.status_code == 200
    assert b"not an HTTP response" in found.content.split(b"\n\n")[-2]
