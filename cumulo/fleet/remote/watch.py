"""Watch: follows one replica, for as long as it belongs to the fleet. One task per replica.

A Cumulo server that lets us in streams its state; one that falls silent hangs. Of any other server /v1/models and
/health are asked from time to time.
"""

import asyncio
import json
import logging
from collections.abc import Callable

import msgspec

from cumulo import __version__
from cumulo.fleet.decide.choosing import Told, refusal, stray
from cumulo.fleet.remote.options import RemoteOptions
from cumulo.fleet.remote.replica import UpstreamReplica
from cumulo.fleet.wire import PROOF_HEADER, STATE_PATH, STATE_TYPE, VIA_HEADER, FleetNews, read_news
from cumulo.load.connection import NoHttp, UpstreamError, UpstreamExchange

log = logging.getLogger(__name__)
LOOP_STATUS = 508
_LEADS_BACK = "is this gateway itself, or leads back to it: name the servers behind it instead"
_MOST_LINE_BYTES = 64 << 20
_TICK_S = 0.25
_PROBE_EVERY_S = 2.0
_LONGEST_PAUSE_S = 5.0


class Refused(Exception):
    """The server answers, but cannot be a replica here."""


class NotReady(Exception):
    """The server answers, and will take requests later."""


class Watch:
    def __init__(
        self,
        replica: UpstreamReplica,
        options: RemoteOptions,
        others: Callable[[], list[UpstreamReplica]],
        on_change: Callable[[UpstreamReplica], None],
    ) -> None:
        """`others`: the other replicas of the gateway. `on_change`: told when it takes requests, or takes
        none any more."""
        self._replica, self._options = replica, options
        self._others, self._on_change = others, on_change
        self.settled = asyncio.Event()  # it has said what it is, or did not answer
        self._stuck_at: int | None = None  # the last step of an engine that stands still

    async def run(self) -> None:
        """Follows the server until it is cancelled."""
        replica, pause_s = self._replica, 0.2
        while True:
            replica.refused = False
            try:
                await self._follow()
                trouble = "closed the connection"
            except Refused as refused:
                trouble, replica.refused = str(refused), True
            except NotReady as error:
                trouble = f"is not ready: {error}"
            except UpstreamError as error:
                trouble, replica.refused = f"does not answer: {error}", isinstance(error, NoHttp)
            except Exception as error:  # of whatever a server may say: it is watched on
                log.exception("%s cannot be followed", replica.name)
                trouble = f"cannot be followed: {type(error).__name__}: {error}"
            pause_s = 0.2 if not replica.trouble else min(_LONGEST_PAUSE_S, 2 * pause_s)
            if not replica.trouble or replica.trouble != trouble:
                log.warning("%s takes no requests: %s", replica.name, trouble)
            replica.lose(trouble)
            self.settled.set()
            self._on_change(replica)
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        """Follows the server until it is in trouble."""
        key = self._replica.key
        if key is None:
            await self._probe_for_ever()
            return
        proof = key.prove("GET", STATE_PATH.encode())
        exchange = await self._ask(STATE_PATH, [(PROOF_HEADER, proof)])
        try:
            status, headers = exchange.response.status, exchange.response.headers
            kind = headers.get("content-type", STATE_TYPE)
            if status == 200 and kind.startswith(STATE_TYPE):
                if not key.is_answered(proof, headers.get(PROOF_HEADER.decode(), "")):
                    raise Refused("answers as a Cumulo server does, and does not know the fleet's key")
                await self._follow_state(exchange)
            elif status == LOOP_STATUS:
                raise Refused(_LEADS_BACK)
            elif status == 401:
                raise Refused(await self._reason(exchange))
            elif status in (200, 404):  # some servers have an answer for every path
                exchange.close()
                self._replica.identity = None
                await self._probe_for_ever()
            elif status == 503:
                raise NotReady(await self._reason(exchange))
            else:
                raise UpstreamError(f"{STATE_PATH} gives status {status}: {await self._reason(exchange)}")
        finally:
            exchange.close()

    async def _ask(self, path: str, headers: list[tuple[bytes, bytes]]) -> UpstreamExchange:
        upstream, via = self._replica.upstream, (VIA_HEADER, self._options.id.encode())
        exchange = await upstream.begin(upstream.request("GET", path, [*headers, via]))
        try:
            async with asyncio.timeout(self._options.hang_timeout_s):
                await exchange.head()
        except TimeoutError:
            exchange.close()
            raise UpstreamError(f"GET {path} had no answer in {self._options.hang_timeout_s:g} s") from None
        return exchange

    # -- Cumulo servers -----------------------------------------------------------------------------------
    async def _follow_state(self, exchange: UpstreamExchange) -> None:
        reading = asyncio.create_task(self._read_state(exchange))
        try:
            await self._keep_time(reading)
            await reading
        finally:
            reading.cancel()

    async def _read_state(self, exchange: UpstreamExchange) -> None:
        rest = b""
        while pieces := await exchange.next_pieces():
            *lines, rest = (rest + b"".join(pieces)).split(b"\n")
            if len(rest) > _MOST_LINE_BYTES:
                raise Refused("its state has a line without end: it is no Cumulo server")
            for line in lines:
                try:
                    self._take(read_news(line))
                except msgspec.MsgspecError as error:
                    raise Refused(
                        f"its state cannot be read ({error}): install the same version on both"
                    ) from None

    def _take(self, news: FleetNews) -> None:
        replica = self._replica
        if news.identity is not None:
            identity = replica.identity = news.identity
            told = Told((identity.model,), identity.version, identity.tokenizer)
            self._check(told)
        replica.take_news(news)
        if news.steps != self._stuck_at or not (news.running or news.waiting):
            self._stuck_at = None
        trouble = "" if news.ready else "is not ready: its engine is being restarted"
        if self._stuck_at is not None:
            trouble = "is not ready: its engine has work and finishes no step"
        if trouble != replica.trouble:
            self._become(trouble)

    async def _keep_time(self, reading: "asyncio.Task[None]") -> None:
        """Raises UpstreamError when it hangs. Counted in ticks: what holds us up is no fault of the replica's."""
        replica, options, loop = self._replica, self._options, asyncio.get_running_loop()
        silent_s = stalled_s = 0.0
        seen, steps, ticked_s = replica.news, -1, loop.time()
        while not reading.done():
            await asyncio.sleep(_TICK_S)
            passed_s = min(loop.time() - ticked_s, 2 * _TICK_S)
            ticked_s = loop.time()
            silent_s = silent_s + passed_s if replica.news is seen else 0.0
            seen = replica.news
            busy = bool(seen.running or seen.waiting) and seen.ready
            stalled_s = stalled_s + passed_s if busy and seen.steps == steps else 0.0
            steps = seen.steps
            if silent_s >= options.hang_timeout_s:
                raise UpstreamError(f"it said nothing for {options.hang_timeout_s:g} s")
            if stalled_s >= options.stall_timeout_s:
                self._stuck_at = steps
                raise UpstreamError(f"its engine finished no step for {options.stall_timeout_s:g} s")

    # -- other servers ------------------------------------------------------------------------------------
    async def _probe_for_ever(self) -> None:
        while True:
            exchange = await self._ask("/v1/models", [])
            models = await self._json(exchange)
            if exchange.response.status == 401:
                names: list[str] = []  # it wants a client's key: nobody else can ask
            elif exchange.response.status != 200:
                if exchange.response.status == LOOP_STATUS:
                    raise Refused(_LEADS_BACK)
                raise UpstreamError(f"GET /v1/models gives status {exchange.response.status}")
            else:
                try:
                    names = [str(one["id"]) for one in models["data"]]  # type: ignore[index,union-attr]
                except (KeyError, TypeError):
                    raise Refused("/v1/models is not what an OpenAI-compatible server answers") from None
            if not names and self._replica.member.model is not None:
                names = [self._replica.member.model]
            if not names:
                raise Refused(
                    "/v1/models needs a key, so its models are not known: name the model with --pool MODEL=URL"
                )
            self._check(Told(tuple(names)))
            if self._replica.trouble:
                self._become("")
            await asyncio.sleep(_PROBE_EVERY_S)

    # -- both ---------------------------------------------------------------------------------------------
    def _check(self, told: Told) -> None:
        replica = self._replica
        others = [(one.name, one.told, one.member.model) for one in self._others() if one.told is not None]
        known = [(name, said) for name, said, _ in others]
        problem = refusal(replica.name, replica.member.model, told, __version__, known)
        if not problem and replica.told is None and replica.member.model is None:
            # Only the first time: servers may be restarted with another model, one after the other.
            problem = stray(replica.name, told, [(name, said) for name, said, pool in others if pool is None])
        if problem:
            raise Refused(problem)
        replica.told = told

    def _become(self, trouble: str) -> None:
        replica = self._replica
        replica.trouble = trouble
        if not trouble:
            replica.breaker.on_success()
            log.info("%s takes requests for %s", replica.name, ", ".join(replica.models))
        self.settled.set()
        self._on_change(replica)

    async def _json(self, exchange: UpstreamExchange) -> dict[str, object] | None:
        try:
            content = json.loads(await exchange.whole(self._options.hang_timeout_s))
        except (ValueError, RecursionError):
            return None
        return content if isinstance(content, dict) else None

    async def _reason(self, exchange: UpstreamExchange) -> str:
        content = await self._json(exchange)
        error = content.get("error") if content is not None else None
        return str(error.get("message")) if isinstance(error, dict) else f"status {exchange.response.status}"
