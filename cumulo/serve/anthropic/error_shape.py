"""Errors as Anthropic's API words them. Called by errors.py for every path under /v1/messages, and by streams."""

import json
import secrets
from collections.abc import MutableMapping
from typing import Any

_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    return path == _PATH or path.startswith(f"{_PATH}/")


def request_id(scope: MutableMapping[str, Any]) -> str:
    """The call's id; a request that was refused before it had one gets one here, for the client and the log."""
    state: dict[str, Any] = scope.setdefault("state", {})
    return str(state.setdefault("call_id", f"req_{secrets.token_hex(12)}"))


def error_body(status: int, message: str, request_id: str) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    # ASCII: a message may quote a lone surrogate, which has no UTF-8.
    return json.dumps(error, separators=(",", ":")).encode("ascii")
