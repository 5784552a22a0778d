"""Refusals: the answers the transport gives by itself, each with its reason for the metrics. Used by Connection."""

from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from cumulo.serve.errors import ApiError
from cumulo.serve.http.limits import HttpLimits

Refusal = tuple[ApiError, str]


def malformed() -> Refusal:
    return ApiError(400, "this is not a valid HTTP/1.1 request", code="malformed_request"), "malformed"


def bad_handshake() -> Refusal:
    message = "this is not the handshake of a WebSocket, which is a GET without a body: leave out Upgrade"
    return ApiError(400, message, code="malformed_request"), "malformed"


def header_too_large(limits: HttpLimits) -> Refusal:
    error = ApiError(
        431,
        f"the request's header is too large: this server takes {limits.headers} lines, "
        f"{limits.header_line_bytes:,} bytes per line and {limits.head_bytes:,} bytes altogether",
        code="header_too_large",
    )
    return error, "header_too_large"


def url_too_long(limits: HttpLimits) -> Refusal:
    message = f"the URL is longer than the {limits.url_bytes:,} bytes this server takes"
    return ApiError(414, message, code="url_too_long"), "header_too_large"


def too_much_framing() -> Refusal:
    message = "the chunks of the body carry too much beside it: sizes, extensions or trailers"
    return ApiError(400, message, code="malformed_request"), "framing"


def body_too_large() -> Refusal:
    return ApiError(
        413, "the body is larger than this server reads", code="request_too_large"
    ), "body_too_large"


def too_many_pipelined() -> Refusal:
    return ApiError(400, "too many requests were sent without waiting for an answer"), "pipelined"


def too_many_connections() -> Refusal:
    error = ApiError(
        503,
        "the server has as many connections as it can serve: try again soon",
        code="too_many_connections",
        retry_after_s=2,
    )
    return error, "over_limit"


def too_many_sockets() -> Refusal:
    error = ApiError(503, "too many sockets are open: try again later", retry_after_s=10)
    return error, "over_limit"


def header_too_slow(limits: HttpLimits) -> Refusal:
    message = f"the header did not come within {limits.header_timeout_s:g} s"
    return ApiError(408, message, code="header_timeout"), "header_timeout"


def body_too_slow(limits: HttpLimits) -> Refusal:
    message = (
        f"the body came too slowly: nothing for {limits.body_timeout_s:g} s, or less than "
        f"{limits.least_bytes_s:,.0f} bytes a second"
    )
    return ApiError(408, message, code="body_timeout"), "body_timeout"


def written(error: ApiError, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The error as an answer that ends the connection, as it goes over the wire."""
    body = error.body()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    lines = [b"%s: %s\r\n" % line for line in default_headers]
    lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])
