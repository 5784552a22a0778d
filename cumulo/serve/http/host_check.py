"""HostCheck: answers only requests that name this server. The outermost ASGI application, put there by `_Run`.

A web page of another site cannot read this server's answers, unless its own name is made to point here (DNS
rebinding): then the browser takes the two for one site, but still sends the page's name as `Host`. And a page that
need not read the answer can do harm by sending: browsers say in `Origin` whose page it is.
"""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from cumulo.serve.errors import ApiError
from cumulo.serve.http.keeper import Tally

_READING = ("GET", "HEAD", "OPTIONS")


class HostCheck:
    def __init__(self, app: ASGIApp, hosts: "AllowedHosts", origins: Iterable[str], tally: Tally) -> None:
        self._app, self._hosts, self._tally = app, hosts, tally
        self._origins = {origin.rstrip("/").lower().encode("latin-1", "replace") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._check(scope)
            except ApiError as error:
                await refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError where the request is not for this server, or a page of another site sends it."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 and (hosts or scope["http_version"] != "1.0"):  # HTTP/1.0 knows no Host
            self._tally.note("host", "a request with %d Host headers", len(hosts))
            raise ApiError(400, f"a request must have one Host header, and this one has {len(hosts)}")
        host = hosts[0] if hosts else None
        if host is not None and host not in self._hosts:
            shown = host[:80].decode("latin-1")
            self._tally.note("host", "a request for the host %r was refused", shown)
            raise ApiError(
                421,
                f"this server does not answer for the host {shown!r}: use its address, or start it with "
                f"`--allow-host {_name(host[:80]) or 'NAME'}`",
                code="host_not_allowed",
            )
        if scope["type"] == "http" and scope["method"] in _READING:
            return
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if origin is not None and not self._is_own_or_allowed(origin, host):
            shown = origin[:80].decode("latin-1")
            self._tally.note("origin", "a request by a page of %r was refused", shown)
            raise ApiError(
                403,
                f"web pages of {shown!r} may not send requests to this server: start it with "
                "`--cors-origin ORIGIN` to allow them",
                code="origin_not_allowed",
            )

    def _is_own_or_allowed(self, origin: bytes, host: bytes | None) -> bool:
        origin = origin.lower()
        own = host is not None and origin.partition(b"://")[2] == host.lower()
        return own or origin in self._origins or b"*" in self._origins


class AllowedHosts:
    """The names in `Host` that mean this server, whatever the port: a tunnel or a container may give it another.

    Only names can be made to point elsewhere. So addresses are taken as they come where the server listens on a
    network, and loopback addresses where it listens on this machine only.
    """

    def __init__(self, bound_host: str, allowed: Iterable[str]) -> None:
        names = {_name(name.encode("idna" if not name.isascii() else "ascii")) for name in allowed}
        self._any = "*" in names
        bound = _address(bound_host.strip("[]"))
        self._local = bound.is_loopback if bound is not None else bound_host.lower() == "localhost"
        names |= {"localhost", bound_host.strip("[]").lower()}
        if not self._local:
            own = socket.gethostname().lower()
            names |= {own, own.partition(".")[0]}
        self._names = names - {""}

    def __contains__(self, host: bytes) -> bool:
        if self._any:
            return True
        name = _name(host)
        address = _address(name)
        return name in self._names or (address is not None and (not self._local or address.is_loopback))


def _name(host: bytes) -> str:
    """A Host header's name or address, without port, brackets and the root's dot; "" where it is neither."""
    try:
        parts = urlsplit("//" + host.decode("ascii"))
        _ = parts.port  # raises ValueError where it is no number
    except ValueError:
        return ""
    if any((parts.path, parts.query, parts.fragment)) or "@" in parts.netloc:
        return ""
    return (parts.hostname or "").removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request, or what asked to become a WebSocket, with the error."""
    if scope["type"] == "http":
        await error.response()(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await receive()
        await error.response()(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close", "code": 4403})
