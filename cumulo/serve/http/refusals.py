"""Refusals: the answers the transport gives by itself, each with its reason for the metrics. Used by Connection."""

from collections.abc import Iterable
from typing import NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from cumulo.serve.errors import ApiError
from cumulo.serve.http.limits import HttpLimits


class Refusal(NamedTuple):
    reason: str
    status: int
    message: str  # with the fields of HttpLimits
    code: str | None = None
    retry_after_s: int | None = None

    def error(self, limits: HttpLimits) -> ApiError:
        message = self.message.format(limits=limits)
        return ApiError(self.status, message, code=self.code, retry_after_s=self.retry_after_s)


MALFORMED = Refusal("malformed", 400, "this is not a valid HTTP/1.1 request", "malformed_request")
BAD_HANDSHAKE = Refusal(
    "malformed", 400,
    "this is not the handshake of a WebSocket, which is a GET without a body: leave out Upgrade",
    "malformed_request",
)  # fmt: skip
HEADER_TOO_LARGE = Refusal(
    "header_too_large", 431,
    "the request's header is too large: this server takes {limits.headers} lines, "
    "{limits.header_line_bytes:,} bytes per line and {limits.head_bytes:,} bytes altogether",
    "header_too_large",
)  # fmt: skip
URL_TOO_LONG = Refusal(
    "header_too_large", 414, "the URL is longer than the {limits.url_bytes:,} bytes this server takes",
    "url_too_long",
)  # fmt: skip
TOO_MUCH_FRAMING = Refusal(
    "framing", 400, "the chunks of the body carry too much beside it: sizes, extensions or trailers",
    "malformed_request",
)  # fmt: skip
BODY_TOO_LARGE = Refusal(
    "body_too_large", 413, "the body is larger than this server reads", "request_too_large"
)
PIPELINED = Refusal(
    "pipelined", 400, "a request was sent without waiting for the answer to the one before it"
)
TOO_MANY_CONNECTIONS = Refusal(
    "over_limit", 503, "the server has as many connections as it can serve: try again soon",
    "too_many_connections", 2,
)  # fmt: skip
TOO_MANY_SOCKETS = Refusal("over_limit", 503, "too many sockets are open: try again later", None, 10)
HEADER_TOO_SLOW = Refusal(
    "header_timeout", 408, "the header did not come within {limits.header_timeout_s:g} s", "header_timeout"
)
BODY_TOO_SLOW = Refusal(
    "body_timeout", 408,
    "the body came too slowly: nothing for {limits.body_timeout_s:g} s, or less than {limits.least_bytes_s:,.0f} "
    "bytes a second",
    "body_timeout",
)  # fmt: skip


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
