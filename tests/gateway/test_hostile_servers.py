"""Answers that a replica may not give: the client of the gateway gets an error that it can read."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.gateway.canned_upstream import HEAD, gateway_before
from tests.gateway.hostile_upstream import EVENTS, NO_HTTP

ASK = {"model": "m", "messages": []}


def asked(answer: bytes, body: dict[str, Any] = ASK) -> httpx.Response:
    async def play() -> httpx.Response:
        async with asyncio.timeout(60), gateway_before(lambda *_: answer) as client:
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(play())


@pytest.mark.parametrize("answer", NO_HTTP)
def test_an_answer_that_is_not_http_becomes_a_502_with_the_reason(answer: bytes) -> None:
    found = asked(answer)
    assert found.status_code == 502
    assert "not an HTTP response" in found.json()["error"]["message"]


def test_what_only_gateways_write_is_nothing_to_clients_of_another_server() -> None:
    found = asked(HEAD + b"x-cumulo-prompt: \xff{\r\ncontent-length: 2\r\n\r\n{}")
    assert (found.status_code, found.json()) == (200, {})


def test_a_stream_that_breaks_the_protocol_ends_with_an_error_event() -> None:
    begun = EVENTS + b"b\r\ndata: {}\n\n \r\n"
    found = asked(begun + b"-6\r\nabcdef\r\n", {**ASK, "stream": True})
    assert found.status_code == 200
    assert b"not an HTTP response" in found.content.split(b"\n\n")[-2]
