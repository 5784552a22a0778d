"""Who sends a request: what the gate has found out, for the endpoints."""

from starlette.requests import Request

from cumulo.serve.access.keys import Caller
from cumulo.serve.errors import ApiError


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller


def require_operator(request: Request) -> None:
    """Refuse a caller whose key may not operate the server."""
    if not caller_of(request).may_operate:
        raise ApiError(
            403,
            "this API key may not operate the server; make one that may with --new-api-key NAME --operator",
            code="not_an_operator",
        )
