"""Errors as OpenAI's API words them, {"error": {message, type, param, code}}, and as Anthropic's and Ollama's do.

ApiError is raised by endpoints; `install` makes FastAPI's own errors (validation, unknown routes, bugs of
ours) look the same.
"""

import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from cumulo.errors import CumuloError, PromptTooLong

log = logging.getLogger(__name__)


ClientGone = ClientDisconnect  # nobody is left to answer


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        # ASCII: a message may quote a lone surrogate, which has no UTF-8.
        return json.dumps({"error": error}, separators=(",", ":")).encode("ascii")

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


_KINDS_OF_BOTH = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_KINDS = {**_KINDS_OF_BOTH, 503: "service_unavailable_error"}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def problem_error(problems: Sequence[Any]) -> ApiError:
    """The first of pydantic's `problems` with a request, named the way the client wrote it."""
    first = _telling(problems)
    param = _field_name(list(first["loc"]))
    kind = first["type"]
    if kind == "missing":
        return invalid(f"'{param}' is missing", param, "missing_required_parameter")
    if kind in ("model_attributes_type", "model_type", "dict_type") and not param:
        return invalid("the body must be a JSON object, sent with Content-Type: application/json")
    # Pydantic's words, less those that speak of pydantic.
    reason = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return invalid(f"'{param}': {reason}" if param else reason, param or None, "invalid_value")


def _telling(problems: Sequence[Any]) -> dict[str, Any]:
    """Of a field that may be of several types, all are tried; the one of the right type tells what is wrong."""
    first: dict[str, Any] = problems[0]
    same_field = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]
    return next((problem for problem in same_field if not problem["type"].endswith("_type")), first)


_TYPES = ("str", "int", "float", "NamedTool", "AllowedTools", "ChosenFunction")  # pydantic's, no fields


def _field_name(place: list[Any]) -> str:
    """The field as the client wrote it: pydantic's names of the types it tried are left out."""
    name = ""
    for index, part in enumerate(place):
        if index and isinstance(part, str) and ("[" in part or "-" in part or part in _TYPES):
            continue
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name


def shaped(error: ApiError, scope: Scope) -> Response:
    """The error as the API that the path belongs to words it."""
    if scope["path"].startswith(_OLLAMA_PATH):
        return Response(ollama_error(error.message), error.status, error.headers, "application/json")
    if not speaks_anthropic(scope["path"]):
        return error.response()
    # The call's id; a request that was refused before it had one gets one here, for the client and the log.
    request_id = scope.setdefault("state", {}).setdefault("call_id", f"req_{secrets.token_hex(12)}")
    body = anthropic_error(error.status, error.message, request_id, error.code)
    return Response(body, error.status, error.headers, "application/json")


_OLLAMA_PATH = "/api/"


def ollama_error(message: str) -> bytes:
    """The body of an error under /api/, or the last line of an answer that fails."""
    return json.dumps({"error": message}, separators=(",", ":")).encode("ascii")


# -- Anthropic's shape ------------------------------------------------------------------------------------
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    **_KINDS_OF_BOTH,
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


NO_THREADS = "thread_unsupported_request"


def anthropic_error(status: int, message: str, request_id: str, code: str | None = None) -> bytes:
    """The body of an error under /v1/messages. From its details clients know that they must do without threads."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": message}
    if code == NO_THREADS:
        told["details"] = {"error_code": code, "unsupported": ["thread"]}
    error = {"type": "error", "error": told, "request_id": request_id}
    # ASCII: a message may quote a lone surrogate, which has no UTF-8.
    return json.dumps(error, separators=(",", ":")).encode("ascii")


# -- FastAPI's own errors ---------------------------------------------------------------------------------


def _methods(request: Request) -> str:
    """What a path can be asked with. It may have several routes, and the router names only the first one's."""
    routes: Sequence[Any] = getattr(request.app.state, "routes", ())
    path = request.scope["path"]
    found = {method for route in routes if route.path_regex.match(path) for method in route.methods}
    return ", ".join(sorted(found))


def install(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return shaped(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        """Query and path parameters: bodies are read by BodyReader."""
        problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
        return shaped(problem_error(problems), request.scope)

    @app.exception_handler(CumuloError)
    async def user_error(request: Request, error: CumuloError) -> Response:
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return shaped(invalid(str(error), code=code), request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path} here; /docs lists what there is"
        headers = error.headers
        if error.status_code == 405:
            possible = _methods(request) or (headers or {}).get("Allow", "another method")
            message = f"{request.method} is not possible on {request.url.path}; use {possible}"
            headers = {**(headers or {}), "Allow": possible}
        return shaped(ApiError(error.status_code, message, headers=headers), request.scope)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it; the log and the metrics do

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return shaped(ApiError(500, "the server failed on this request; its log says more"), request.scope)
