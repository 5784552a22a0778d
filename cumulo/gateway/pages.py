"""GatewayPages: the gateway's own endpoints: health, readiness, metrics, models, the fleet (with a page at /),
and explanations."""

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cumulo import __version__
from cumulo.errors import CumuloError
from cumulo.fleet.remote.replica import UpstreamReplica
from cumulo.fleet.remote.replicas import Replicas
from cumulo.fleet.wire import FleetAsk, FleetCaller
from cumulo.gateway.metrics import GatewayMetrics
from cumulo.gateway.options import GatewayOptions, MemberRow
from cumulo.gateway.stories import GatewayStories, ProxiedRecord
from cumulo.load.connection import UpstreamError
from cumulo.serve.access.keys import ApiKeys, Caller, no_entry, shown_key
from cumulo.serve.access.limits import RateLimits
from cumulo.serve.errors import ApiError, invalid


class GatewayGate:
    """Who may ask what. Clients' keys are checked here where the gateway has a file of them."""

    def __init__(self, options: GatewayOptions) -> None:
        anyone = self.anyone = Caller("anyone", options.requests_per_minute, options.tokens_per_minute)
        self.keys = ApiKeys(options.api_keys, anyone) if options.api_keys is not None else None
        self.limits = RateLimits()
        self._operator_key = options.operator_key

    def caller(self, scope: Scope) -> Caller:
        """Raises ApiError 401 or 429. Charges a request."""
        caller: Caller | None = self.anyone
        if self.keys is not None:
            caller = self.keys.caller_of(shown_key(Headers(scope=scope)))
            if caller is None:
                raise no_entry("this API key is not valid here")
        assert caller is not None
        if scope["method"] == "POST":
            self.limits.charge_request(caller)
        return caller

    def fleet_caller(self, caller: Caller) -> FleetCaller | None:
        """For the replicas, which then ask for no key. Limits are kept here, for all replicas together."""
        if self.keys is None:
            return None
        return FleetCaller(
            caller.name,
            may_go_first=caller.may_go_first,
            may_see_names=caller.may_see_names,
            cache_scope=caller.cache_scope,
        )

    def cache_scope(self, caller: Caller, scope: Scope) -> str:
        """Who shares cached prefixes: by key, here or at the replicas."""
        if caller.cache_scope:
            return caller.cache_scope
        keys = [value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
        return json.dumps([hashlib.blake2b(b"".join(keys), digest_size=8).hexdigest()]) if keys else ""

    def owner(self, caller: Caller, scope: Scope) -> str:
        """Names the caller whose request it is. Each key is one, also where only the replicas check keys."""
        return f"{caller.name} {self.cache_scope(caller, scope)}"

    def may_operate(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        shown = shown_key(headers) if "authorization" in headers or "x-api-key" in headers else ""
        if self._operator_key is not None and hmac.compare_digest(
            shown.encode("utf-8", "replace"), self._operator_key.encode()
        ):
            return True
        caller = self.keys.caller_of(shown) if self.keys is not None else None
        return caller is not None and caller.may_operate

    def check_operator(self, scope: Scope) -> None:
        """Who changes the fleet shows an operator's key; raises ApiError."""
        if self.may_operate(scope):
            return
        if self._operator_key is None and self.keys is None:
            raise ApiError(
                403,
                "replicas are added, drained and removed with an operator's key, and this gateway has none: start "
                "it with --operator-key-file, or with --api-keys and a key that may operate",
                code="no_operator_key",
            )
        raise no_entry("this is not an operator's key")


_REPLICAS = "/v1/fleet/replicas"
_RECENT = 50


class GatewayPages:
    def __init__(
        self,
        gate: GatewayGate,
        fleet: Replicas,
        metrics: GatewayMetrics,
        stories: GatewayStories,
        is_draining: Callable[[], bool],
    ) -> None:
        self._gate, self._fleet, self._metrics, self._stories = gate, fleet, metrics, stories
        self._is_draining = is_draining

    async def answered(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether the path is one of the gateway's own; then it has been answered. Raises ApiError."""
        path, method = scope["path"], scope["method"]
        response: Response | None = None
        if method in ("GET", "HEAD"):
            response = await self._get(scope, path)
        elif path.startswith("/v1/fleet"):
            self._gate.check_operator(scope)
            response = await self._change(scope, receive)
        if response is None:
            return False
        await response(scope, receive, send)
        return True

    async def _get(self, scope: Scope, path: str) -> Response | None:
        if path == "/health":
            return self._health(True)
        if path == "/ready":
            return self._health(bool(self._taking()) and not self._is_draining())
        if path == "/metrics":
            return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == "/":
            return fleet_page()
        if path == "/version":
            return _json({"version": __version__})
        if not path.startswith(("/v1/models", "/v1/fleet", "/v1/requests/")):
            return None
        owner = None  # all
        if not self._gate.may_operate(scope):
            owner = self._gate.owner(self._gate.caller(scope), scope)
        if path == "/v1/models":
            return _json({"object": "list", "data": [self._model(name) for name in self._fleet.models()]})
        if path.startswith("/v1/models/"):
            return self._one_model(unquote(path.removeprefix("/v1/models/")))
        if path in ("/v1/fleet", _REPLICAS):
            return _json(self._whole_fleet(owner))
        parts = path.split("/")
        if len(parts) == 5 and parts[2] == "requests" and parts[4] == "explain":
            return await self._explain(unquote(parts[3]), owner)
        return None

    # -- health and models --------------------------------------------------------------------------------
    def _taking(self) -> list[UpstreamReplica]:
        now_s = time.monotonic()
        return [replica for replica in self._fleet.replicas.values() if not replica.refuses(now_s)]

    def _health(self, good: bool) -> Response:
        body = {
            "status": "ok" if good else "unavailable",
            "draining": self._is_draining(),
            "replicas": len(self._fleet.replicas),
            "taking_requests": len(self._taking()),
        }
        return _json(body, 200 if good else 503)

    def _model(self, name: str) -> dict[str, Any]:
        replicas = self._fleet.models()[name]
        contexts = [one.identity.max_context for one in replicas if one.identity is not None]
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "cumulo" if contexts else "unknown",
            "parent": next((one.parent_of(name) for one in replicas if one.parent_of(name)), None),
            "max_model_len": min(contexts, default=None),
            "replicas": len(replicas),
        }

    def _one_model(self, name: str) -> Response:
        if name not in self._fleet.models():
            raise ApiError(
                404, f"the model {name!r} is not served here", param="model", code="model_not_found"
            )
        return _json(self._model(name))

    # -- the fleet ----------------------------------------------------------------------------------------
    def _whole_fleet(self, owner: str | None) -> dict[str, Any]:
        return {
            "object": "fleet",
            "router": self._fleet.options.router,
            "totals": self._metrics.totals(),
            "replicas": [replica.described() for replica in self._fleet.replicas.values()],
            "recent": [
                {
                    "id": one.call_id or one.id,
                    "replicas": one.replicas,
                    "moves": one.moves,
                    "summary": one.summary(),
                }
                for one in self._stories.recent(_RECENT, owner)
            ],
        }

    async def _change(self, scope: Scope, receive: Receive) -> Response:
        """The same as in a server with several replicas (serve/fleet/endpoints.py), except that a replica has
        an address."""
        method, path = scope["method"], scope["path"]
        if method == "POST" and path == _REPLICAS:
            return await self._add(_read(await _whole(receive)))
        rest = path.removeprefix(f"{_REPLICAS}/")
        if rest != path and method == "DELETE":
            replica = self._named(rest)
            await self._fleet.remove(replica.name)
            return _json({"name": replica.short_name, "url": replica.name, "removed": True})
        name, _, action = rest.rpartition("/")
        if rest != path and method == "POST" and action in ("drain", "undrain"):
            replica = self._named(name)
            replica.draining = action == "drain"
            if replica.draining and b"move=true" in scope["query_string"]:
                replica.move_away()
            self._fleet.note_change()
            return _json(replica.described())
        raise ApiError(
            404,
            f'{method} {path} is not possible; use POST {_REPLICAS} with {{"url": ...}} to add a replica, '
            f"DELETE {_REPLICAS}/HOST:PORT to remove it, or POST {_REPLICAS}/HOST:PORT/drain and /undrain",
        )

    async def _add(self, asked: MemberRow) -> Response:
        try:
            replica = await self._fleet.add(asked.member())
        except CumuloError as error:
            raise ApiError(400, str(error), param="url", code="replica_refused") from None
        return _json(replica.described(), 201)

    def _named(self, text: str) -> UpstreamReplica:
        for replica in self._fleet.replicas.values():
            if text in (replica.name, replica.short_name):
                return replica
        known = ", ".join(one.short_name for one in self._fleet.replicas.values()) or "none"
        raise ApiError(404, f"the fleet has no replica {text!r}; it has {known}", code="replica_not_found")

    # -- why? ---------------------------------------------------------------------------------------------
    async def _explain(self, name: str, owner: str | None) -> Response:
        record = self._stories.named(name, owner)
        if record is None:
            kept = self._stories.capacity
            raise ApiError(
                404,
                f"none of the last {kept} requests of this key is {name!r}; show its own key, or an operator's",
                code="request_not_found",
            )
        told = record.explanation()
        stories = [await self._story(record, replica) for replica in record.replicas]
        data = [one for story in stories for one in story]
        if data:
            data[0] = {**data[0], "summary": f"{record.summary()} {data[0]['summary']}",
                       "events": _merged(record.events, data[0].get("events", []))}  # fmt: skip
        else:
            data = [told]
        return _json({"id": name, "object": "list", "data": data, "gateway": told})

    async def _story(self, record: ProxiedRecord, name: str) -> list[dict[str, Any]]:
        """What the replica itself tells of the request; nothing if it is gone, or no Cumulo server."""
        replica = self._fleet.replicas.get(name)
        if replica is None or not replica.is_cumulo or not record.call_id or replica.trouble:
            return []
        path = f"/v1/requests/{quote(record.call_id, safe='')}/explain"
        headers = replica.signed("GET", path, FleetAsk("0", 0, 0, record.fleet_caller))
        try:
            exchange = await replica.upstream.begin(replica.upstream.request("GET", path, headers))
            whole = await exchange.whole(self._fleet.options.hang_timeout_s)
            found: list[dict[str, Any]] = json.loads(whole)["data"]
        except (UpstreamError, ValueError, KeyError):
            return []
        return [{**one, "replica": name} for one in found]


def _merged(own: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By time. Both count from when the request arrived: at the gateway, and at the replica just after."""
    return sorted([*own, *theirs], key=lambda event: event.get("at_ms") or 0.0)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _read(body: bytes) -> MemberRow:
    try:
        return msgspec.json.decode(body, type=MemberRow)
    except msgspec.MsgspecError as error:
        raise invalid(f"the body cannot be read: {error}; send for instance "
                      '{"url": "http://10.0.0.7:8000"}') from None  # fmt: skip


async def _whole(receive: Receive) -> bytes:
    pieces, more = list[bytes](), True
    while more and sum(map(len, pieces)) < 1 << 16:
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


@cache
def fleet_page() -> Response:
    """A file without code behind it: it asks /v1/fleet, with the key that its reader types where keys are
    needed."""
    text = (files("cumulo.gateway") / "web" / "fleet.html").read_text("utf-8")
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {_hash(text, 'script')}; "
        f"style-src {_hash(text, 'style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(
        text,
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"},
    )


def _hash(text: str, tag: str) -> str:
    """The hash of what stands in the page itself: nothing else runs."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
