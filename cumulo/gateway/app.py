"""GatewayApp: the gateway as an ASGI application. Its own paths are answered here, all others are passed on."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from cumulo.fleet.decide.prompt_text import Peek, peek
from cumulo.fleet.remote.replicas import NoReplica, PromptHint, Replicas, UnknownModel
from cumulo.fleet.remote.watch import LOOP_STATUS
from cumulo.fleet.wire import VIA_HEADER, FleetAsk
from cumulo.gateway.bodies import Bodies, is_upload
from cumulo.gateway.metrics import GatewayMetrics
from cumulo.gateway.options import GatewayOptions
from cumulo.gateway.pages import GatewayGate, GatewayPages
from cumulo.gateway.proxied_request import STORED, ProxiedRequest
from cumulo.gateway.stories import GatewayStories, ProxiedRecord
from cumulo.serve.errors import ApiError, ClientGone, shaped
from cumulo.serve.http.host_check import refuse

log = logging.getLogger("cumulo.gateway.access")

_PASSED = ("/v1/", "/v2/", "/tokenize", "/detokenize", "/rerank", "/score")
_QUICK_BYTES = 256 << 10  # of a body that is read in the event loop
_SEED_BITS = 63
_Read = TypeVar("_Read")


class GatewayApp:
    def __init__(self, options: GatewayOptions, fleet: Replicas) -> None:
        self.options, self.fleet = options, fleet
        self.gate = GatewayGate(options)
        self.metrics = GatewayMetrics(fleet)
        self.bodies = Bodies(options.max_body_bytes, options.max_held_bytes, options.api_keys is not None)
        self.stories = GatewayStories(options.stories)
        self.draining = False
        self.in_flight = 0
        self._operation = GatewayPages(self.gate, fleet, self.metrics, self.stories, lambda: self.draining)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse(
                ApiError(501, "the gateway passes on no WebSockets", code="no_websockets"),
                scope,
                receive,
                send,
            )
        if scope["type"] != "http":
            return
        received_s, path = time.perf_counter(), scope["path"]
        exchange = _Sending(send, self.draining)
        try:
            if (VIA_HEADER, self.options.id.encode()) in scope["headers"]:
                raise ApiError(
                    LOOP_STATUS,
                    "the request came back to the gateway that sent it: a gateway behind it has it as a replica; "
                    "remove it there (DELETE /v1/fleet/replicas/HOST:PORT)",
                    code="loop",
                )
            if await self._operation.answered(scope, receive, exchange):
                return
            if not path.startswith(_PASSED):
                raise ApiError(404, f"there is no {path} here; the gateway passes on what is under /v1/")
            await self._pass_on(scope, receive, exchange, received_s)
        except ApiError as error:
            if not exchange.status:
                await shaped(error, scope)(scope, receive, exchange)
        except ClientGone:
            exchange.status = exchange.status or 499
        except Exception:
            log.exception("%s %s failed", scope["method"], path)
            if exchange.status:
                raise  # which ends the connection: an answer that has begun cannot become an error
            bug = ApiError(500, "the gateway failed on this request; its log says more")
            await shaped(bug, scope)(scope, receive, exchange)
        finally:
            if path.startswith(_PASSED):
                took_ms = (time.perf_counter() - received_s) * 1e3
                log.info("%s %s %d %.1f ms", scope["method"], path, exchange.status, took_ms)

    # -- passing on ---------------------------------------------------------------------------------------
    async def _pass_on(self, scope: Scope, receive: Receive, exchange: "_Sending", received_s: float) -> None:
        caller = self.gate.caller(scope)
        owner, fleet_caller = self.gate.owner(caller, scope), self.gate.fleet_caller(caller)
        with self.bodies.open(caller) as held:
            if is_upload(scope):
                body, upload, asked = b"", held.upload(scope, receive), Peek()
            else:
                body, upload = await held.whole(receive), None
                asked = await _beside(len(body), peek, body)
            chain = await _beside(len(body), asked.chain, self.gate.cache_scope(caller, scope))
            prompt = PromptHint(
                asked.model, chain, len(asked.text), asked.session or _session(scope), caller.name,
                asked.priority or 0,
            )  # fmt: skip
            record = ProxiedRecord(
                secrets.token_hex(12), owner, fleet_caller, scope["path"], asked.model, bool(asked.stream),
                received_s,
            )  # fmt: skip
            ask = FleetAsk(record.id, int(time.time()), secrets.randbits(_SEED_BITS), fleet_caller)
            self.in_flight += 1
            self.stories.add(record)
            try:
                self.gate.limits.charge_prompt(
                    caller, self.fleet.prompt_tokens(asked.model, prompt.text_bytes)
                )
                pinned = self._pinned(scope["path"], caller.name, owner, asked.previous_response_id)
                await ProxiedRequest(
                    self.fleet, scope, receive, exchange, body, asked, prompt, ask, record, pinned, upload,
                ).run()  # fmt: skip
                self.gate.limits.charge_output(caller, record.output_tokens or 0)
            except UnknownModel as error:
                raise ApiError(404, str(error), param="model", code="model_not_found") from None
            except NoReplica as error:
                raise ApiError(503, str(error), code="no_replica", retry_after_s=2) from None
            finally:
                self.in_flight -= 1
                self.metrics.in_flight.set(self.in_flight)
                record.ended_s = record.ended_s or time.perf_counter()
                self.metrics.on_end(record, exchange.status or 499)

    def _pinned(self, path: str, caller: str, owner: str, previous: str | None) -> str | None:
        """The replica that has stored what is asked about; None: any may answer."""
        if path.startswith(STORED):
            # Rendezvous hashing: when a replica comes or goes, the callers of the others stay where they are.
            # Where there are Cumulo servers, no other one is given files.
            there = [one for one in self.fleet.replicas.values() if not one.draining]
            names = [one.name for one in there if one.is_cumulo] or [one.name for one in there]
            return max(names, default=None, key=lambda name: blake2b(f"{caller}|{name}".encode()).digest())
        stored = previous
        if path.startswith("/v1/responses/"):
            stored = path.split("/")[3]
        if stored is None:
            return None
        record = self.stories.named(stored, owner)
        return record.replicas[-1] if record is not None and record.replicas else None


class _Sending:
    """Notes the status. While the gateway drains, clients are told to come on another connection next time."""

    __slots__ = ("_draining", "_send", "status")

    def __init__(self, send: Send, draining: bool) -> None:
        self._send, self._draining, self.status = send, draining, 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._draining:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await self._send(message)


async def _beside(size: int, read: Callable[[Any], _Read], given: Any) -> _Read:
    """Reads what is large beside the event loop."""
    return await asyncio.to_thread(read, given) if size > _QUICK_BYTES else read(given)


def _session(scope: Scope) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-session-id"), "")
