"""Front: ASGI middleware before everything else; sends the console's paths to its pages and the rest to the API.

It also asks for a key where the server has keys, and refuses sockets and forms that other web sites send.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cumulo.serve.access.keys import ApiKeys, Caller

COOKIE = "cumulo_console"
LIFETIME_S = 12 * 3600
_MOST_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class Visitor:
    """`key` is None where the server asks for none; then everybody sees everything."""

    name: str
    key: str | None = None
    may_see_names: bool = False  # of other keys, and calls whose caller is not known
    may_operate: bool = False  # drain and restart replicas; an operator sees the requests of all keys

    def may_see(self, caller: str | None) -> bool:
        """Whether this visitor may see the requests of a caller; None is a call without a valid key. What is seen
        are numbers and times: no text is kept."""
        return self.key is None or self.may_see_names or self.may_operate or caller == self.name


class Sessions:
    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys
        self._sessions: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # token's hash: key, until when

    @property
    def needed(self) -> bool:
        return self._keys is not None

    def begin(self, key: str) -> str | None:
        """A token for the cookie; None if the key is not valid."""
        if self._caller(key) is None:
            return None
        token = secrets.token_urlsafe(32)
        self._sessions[_digest(token)] = key, time.monotonic() + LIFETIME_S
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return token

    def end(self, cookies: Mapping[str, str]) -> None:
        self._sessions.pop(_digest(cookies.get(COOKIE, "")), None)

    def visitor(self, cookies: Mapping[str, str]) -> Visitor | None:
        """Who sent these cookies; None: they must show a key first."""
        if self._keys is None:
            return Visitor("anyone", may_operate=True)
        key, until_s = self._sessions.get(_digest(cookies.get(COOKIE, "")), ("", 0.0))
        caller = self._caller(key) if time.monotonic() < until_s else None
        if caller is None:
            return None
        return Visitor(caller.name, key, caller.may_see_names, caller.may_operate)

    def still_valid(self, visitor: Visitor) -> bool:
        return visitor.key is None or self._caller(visitor.key) is not None

    def _caller(self, key: str) -> Caller | None:
        return self._keys.caller_of(key) if self._keys is not None and key else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


_PAGES = {"/", "/requests", "/live", "/fleet", "/jobs", "/system"}
_PLAIN = {"/login", "/logout"}
_OPEN = ("/_nicegui/", "/favicon.ico")  # scripts, styles, fonts: the same for everyone
_SOCKET = "/_nicegui_ws/"
_MOST_SOCKETS, _MOST_SOCKETS_OF_ONE = 256, 64  # each may hold a message that has not ended
_MESSAGES_PER_S = 200  # of one socket, which later ones wait for; a page sends a few
_LARGEST_FORM_BYTES = 4096
_LOGIN = (Path(__file__).parent / "login.html").read_text("utf-8")

_NO_PAGE = """<!doctype html><html lang="en"><meta name="viewport" content="width=device-width">
<title>Not found · Cumulo</title><style>:root { color-scheme: light dark }
body { font: 16px/1.6 system-ui; margin: 18vh auto;
max-width: 480px; padding: 0 20px; overflow-wrap: anywhere }</style>
<h1>There is no such page</h1><p>The server has no PATH.</p>
<p><a href="/">Chat</a> · <a href="/docs">API reference</a></p></html>"""

# Whatever a page contains, the browser asks no other host for anything.
_HEADERS = (
    (b"content-security-policy", b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
     b"frame-ancestors 'none'; form-action 'self'; base-uri 'self'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)  # fmt: skip


class Front:
    def __init__(self, app: ASGIApp, pages: ASGIApp, sessions: Sessions) -> None:
        self._api, self._pages, self._sessions = app, pages, sessions
        self._sockets: Counter[tuple[str, str]] = Counter()  # by visitor and address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_page = path in _PAGES or path.startswith("/requests/")
        if scope["type"] not in ("http", "websocket") or not (
            is_page or path in _PLAIN or path.startswith((*_OPEN, _SOCKET))
        ):
            await self._api(scope, receive, _with_page(scope, send))
            return
        connection = HTTPConnection(scope)
        if path in _PLAIN and scope["type"] == "http":
            await (await self._session_change(Request(scope, receive)))(scope, receive, send)
        elif path.startswith(_SOCKET) and not (
            _same_site(connection) and self._sessions.visitor(connection.cookies) is not None
        ):
            await _refuse(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._open_socket(connection, scope, receive, send)
        elif is_page and self._sessions.visitor(connection.cookies) is None:
            await RedirectResponse("/login", 303)(scope, receive, send)
        else:
            await self._pages(scope, receive, _with_headers(send) if is_page else send)

    async def _open_socket(
        self, connection: HTTPConnection, scope: Scope, receive: Receive, send: Send
    ) -> None:
        visitor = self._sessions.visitor(connection.cookies)
        who = visitor.name if visitor else "", connection.client.host if connection.client else ""
        if self._sockets[who] >= _MOST_SOCKETS_OF_ONE or self._sockets.total() >= _MOST_SOCKETS:
            await _refuse(scope, receive, send)
            return
        free_s = 0.0

        async def at_pace() -> Message:
            nonlocal free_s
            message = await receive()
            free_s = max(free_s, (now_s := time.monotonic()) - 1) + 1 / _MESSAGES_PER_S
            if free_s > now_s:
                await asyncio.sleep(free_s - now_s)
            return message

        self._sockets[who] += 1
        try:
            await self._pages(scope, at_pace, send)
        finally:
            self._sockets[who] -= 1
            self._sockets += Counter()  # names of zero go

    async def _session_change(self, request: Request) -> Response:
        if request.method == "POST" and not _same_site(request):
            return Response("this form was sent by another web site", 403)
        if request.scope["path"] == "/logout":
            if request.method != "POST":  # a link or an image must not be able to end a session
                return Response(
                    "log out with the button in the console's header", 405, headers={"Allow": "POST"}
                )
            self._sessions.end(request.cookies)
            response: Response = RedirectResponse("/login", 303)
            response.delete_cookie(COOKIE)
            return response
        if not self._sessions.needed or self._sessions.visitor(request.cookies) is not None:
            return RedirectResponse("/", 303)
        if request.method != "POST":
            return _login_page()
        key = await _key_in_form(request)
        token = self._sessions.begin(key)
        if token is None:
            return _login_page("This key is not valid here.", 401)
        response = RedirectResponse("/", 303)
        response.set_cookie(
            COOKIE,
            token,
            max_age=LIFETIME_S,
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
        )
        return response


def _same_site(connection: HTTPConnection) -> bool:
    """Browsers send Origin with every socket and every form; a program that sends none has no cookies to abuse."""
    origin = connection.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == connection.headers.get("host")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_HEADERS]
        await send(message)

    return sending


def _with_page(scope: Scope, send: Send) -> Send:
    """Who reads pages and asks for one that does not exist gets a page; programs get the API's error."""
    accepted = dict(scope.get("headers", ())).get(b"accept", b"")
    if scope["type"] != "http" or scope["method"] != "GET" or b"text/html" not in accepted:
        return send
    page = _NO_PAGE.replace("PATH", escape(scope["path"])).encode()
    replaced = False

    async def sending(message: Message) -> None:
        nonlocal replaced
        if message["type"] == "http.response.start" and message["status"] == 404:
            replaced = True
            headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", b"%d" % len(page))]
            await send({**message, "headers": [*headers, *_HEADERS]})
            await send({"type": "http.response.body", "body": page})
        elif not replaced:
            await send(message)

    return sending


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 4403})
    else:
        await Response("this page belongs to another site, or its session has ended", 403)(
            scope, receive, send
        )


async def _key_in_form(request: Request) -> str:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _LARGEST_FORM_BYTES:
            return ""
    return parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0].strip()


def _login_page(problem: str = "", status: int = 200) -> HTMLResponse:
    """Plain HTML: a cookie can only be set by the answer to a form."""
    response = HTMLResponse(_LOGIN.replace("PROBLEM", escape(problem)), status)
    response.raw_headers.extend(_HEADERS)
    return response
