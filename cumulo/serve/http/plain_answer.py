"""Answers for clients of HTTP/1.0, who know no chunks: an answer of unknown length ends with its connection.

Used by Connection; uvicorn sends chunks to everybody.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def send_plainly(cycle: RequestResponseCycle) -> None:
    """From now on this request's answer has no chunks. Called before its application runs."""
    send, measured = cycle.send, True

    async def send_plain(message: Any) -> None:
        nonlocal measured
        if message["type"] == "http.response.start":
            measured = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not measured:
                cycle.chunked_encoding = cycle.keep_alive = False
        elif not measured:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
