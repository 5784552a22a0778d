"""What passes between client and replica, and how the gateway's own failures are worded in the client's API."""

import json
from collections.abc import Iterable

from cumulo.fleet.wire import ASK_HEADER, KEY_HEADER, PROMPT_HEADER
from cumulo.load.connection import Response
from cumulo.serve.errors import ApiError, anthropic_error, speaks_anthropic

_OWN_OF_A_CONNECTION = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"accept-encoding", b"origin",
    )
)  # fmt: skip
_NEVER_SENT = _OWN_OF_A_CONNECTION | {KEY_HEADER, ASK_HEADER}
_OWN_OF_AN_ANSWER = frozenset(
    (
        "connection",
        "keep-alive",
        "transfer-encoding",
        "content-length",
        "date",
        "server",
        PROMPT_HEADER.decode(),
    )
)


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A client's headers for a replica."""
    return [pair for pair in headers if pair[0] not in _NEVER_SENT]


def response_headers(response: Response) -> list[tuple[bytes, bytes]]:
    """A replica's headers for the client."""
    return [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
        if name not in _OWN_OF_AN_ANSWER
    ]


def is_worth_retrying(status: int, body: bytes) -> bool:
    """Whether another replica may answer what this one refuses: it is at fault, or full, or about to end."""
    return status in (500, 502, 503, 504) or (status == 429 and b'"queue_full"' in body)


def failure_event(path: str, message: str) -> bytes:
    """An error in the middle of a stream."""
    if speaks_anthropic(path):
        return b"event: error\ndata: " + anthropic_error(503, message, "") + b"\n\n"
    error = ApiError(503, message, kind="server_error", code="replica_failed")
    if path == "/v1/responses":
        told = {"type": "error", "code": error.code, "message": message, "param": None}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    return b"data: " + error.body() + b"\n\n"
