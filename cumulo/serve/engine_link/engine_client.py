"""EngineClient: the API process's side of the engine. Requests go out, and what the engine says goes into their
inboxes. It starts the engine process, watches it, and replaces one that died or stands still.

No request is lost: each ends with Finished or with a Failure. When the engine is restarted, requests in flight
are submitted again, to another engine of its fleet where there is one. A stream continues after the tokens that
its client has; a request that ends two engines without a token in between fails and says why.
"""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from array import array
from typing import Protocol

import msgspec

from cumulo.engine.outputs import Delta
from cumulo.serve.adapter_registry import ServedAdapter
from cumulo.serve.engine_link.engine_child import EngineChild, EngineStartError
from cumulo.serve.engine_link.engine_settings import EngineSettings, State, Trouble
from cumulo.serve.engine_link.in_flight import Inbox, InFlight, Observer
from cumulo.serve.engine_link.messages import (
    Abort,
    AdapterReport,
    BlockMap,
    Command,
    DropAdapter,
    EngineJob,
    EngineProgress,
    Failure,
    Fatal,
    Finished,
    InspectBlocks,
    LoadAdapter,
    Ready,
    Report,
    Shutdown,
    Stats,
    Submit,
)

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0  # between attempts to bring an engine back


class EngineFleet(Protocol):
    """The fleet of an engine, as the engine's client sees it."""

    def take_over(self, client: "EngineClient", trouble: Trouble) -> None:
        """Continues the requests of an engine that is gone elsewhere."""
        ...

    def on_progress(self, client: "EngineClient", stats: Stats) -> None: ...
    def on_ready(self, client: "EngineClient") -> None: ...
    def on_failed_start(self, client: "EngineClient", message: str) -> None: ...


class EngineClient:
    def __init__(
        self, settings: EngineSettings, observer: Observer | None = None, fleet: EngineFleet | None = None
    ) -> None:
        """`observer`: None for an engine that has no requests of its own."""
        self.settings, self._observer, self._fleet = settings, observer, fleet
        self.state: State = "starting"
        self.restarts = 0
        self.last_failure: str | None = None
        self.info: Ready | None = None
        self.stats: Stats | None = None
        self.in_flight: dict[str, InFlight] = {}
        self.leaving: set[str] = set()  # requests given away whose end the engine has not told yet
        self.sent = 0  # Submit commands given to the present child
        self._child: EngineChild | None = None
        self._watching: asyncio.Task[None] | None = None  # from the first engine on
        self._unobserved: list[tuple[list[tuple[InFlight, Delta]], float, Stats]] = []
        self._block_maps: list[asyncio.Future[BlockMap]] = []
        self._adapter_answers: dict[str, asyncio.Future[AdapterReport]] = {}  # by key
        self._reports = 0  # of a prefill engine, whose work this process does not know: silent is dead

    @property
    def engine_pids(self) -> tuple[int, ...]:
        return (self._child.pid,) if self._child is not None else ()

    @property
    def max_running(self) -> int:
        return self.info.max_running if self.info is not None else 0

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place in the engine, those on their way to it included."""
        if self.stats is None:
            return len(self.in_flight)
        return self.stats.waiting + max(0, self.sent - self.stats.received)

    # -- life ---------------------------------------------------------------------------------------------
    async def start(self) -> Ready:
        """Start the engine and wait until its model is loaded; raises EngineStartError."""
        self.state = "starting"
        try:
            info = await self._start_child(needs_adapters=True)
        except EngineStartError:
            self.state = "unloaded"
            raise
        self._watching = asyncio.create_task(self._supervise())
        return info

    async def start_until_up(self) -> None:
        """As `start`, but an engine that does not come up is tried again."""
        await self._bring_up()
        self._watching = asyncio.create_task(self._supervise())

    def ask_for_restart(self) -> None:
        """Replace the engine by a new one; what is still in flight is continued."""
        if self._child is not None:
            self._child.to_be_replaced = True

    async def close(self, state: State = "stopped") -> None:
        """Stop the engine. Requests still in flight fail; drain first if they should not."""
        self.state = state
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self._fail(list(self.in_flight.values()), "the server is shutting down")
        if self._child is not None:
            self._child.send(Shutdown())
            await self._child.end(patience_s=3.0)
            self._child = None

    async def unload(self) -> None:
        """Stop the engine while it has no request; `start` brings it back."""
        await self.close("unloaded")
        self._watching = self.stats = None

    async def _start_child(self, needs_adapters: bool = False) -> Ready:
        settings = self.settings
        told = [_load_order(adapter) for adapter in settings.adapters.all.values()]
        job = EngineJob(
            model=settings.model,
            # Where requests without a seed draw theirs: a server that restarts must not repeat itself.
            config=dataclasses.replace(settings.config, seed=secrets.randbits(63)),
            log_level=settings.log_level,
            for_router=settings.for_router,
            adapters=told,
            needs_adapters=needs_adapters,
        )
        child = self._child = EngineChild(job, settings.environment)
        try:
            info = await child.ready(settings.start_timeout_s)
        except BaseException:
            self._child = None
            await child.end()
            raise
        self.state, self.info, self.stats, self.sent = "ready", info, None, 0
        self.leaving.clear()
        self._catch_up({order.key for order in told})
        if self._watching is not None:
            self._note_lost_adapters(info)
        if self._block_maps:  # asked for while there was no engine
            self._send(InspectBlocks())
        if self._fleet is not None:
            self._fleet.on_ready(self)
        return info

    async def _bring_up(self) -> None:
        """Start an engine, trying again until one comes up."""
        pause_s = 0.5
        while True:
            try:
                await self._start_child()
                return
            except EngineStartError as error:
                log.error("%s does not come up: %s; next attempt in %g s", self.settings.who, error, pause_s)
                self._on_failed_start(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    # -- watching -----------------------------------------------------------------------------------------
    async def _supervise(self) -> None:
        """Read what the engine says; when it dies or stands still, bring a new one up. Until cancelled."""
        while True:
            child = self._child
            assert child is not None
            child.listen(self.take_report)
            try:
                trouble = await child.trouble(self._progress, self.settings.stall_timeout_s)
            finally:
                child.stop_listening()
            await self._replace(child, trouble)

    def _progress(self) -> tuple[int, ...] | None:
        """What grows while the engine is alive (steps, guides that were compiled, words with other engines); None:
        it has no work, and may stand still."""
        if not self.in_flight and self.settings.config.role != "prefill":
            return None
        stats = self.stats
        if stats is None:
            return 0, 0, self._reports
        heard = stats.transfers.heard if stats.transfers is not None else 0
        return stats.steps, stats.guides_checked, heard + self._reports

    async def _replace(self, child: EngineChild, trouble: Trouble) -> None:
        self.state, self._child = "restarting", None
        if not trouble.planned:
            self.restarts += 1
            self.last_failure = f"{self.settings.who} {trouble.words}"
        if child.misunderstood is None:
            for report in child.reports():  # what it said before it died
                self.take_report(report)
        self._on_loss(trouble)
        child.send(Shutdown())
        await child.end(patience_s=2.0 if trouble.planned else 0.0)
        await self._bring_up()
        if self._fleet is None:
            log.warning("%s is back; %d requests are submitted again", self.settings.who, len(self.in_flight))
            for request in self.in_flight.values():
                self._send(request.as_it_is_now())

    # -- requests -----------------------------------------------------------------------------------------
    def submit(self, submit: Submit, inbox: Inbox, position: int = 0) -> InFlight:
        """Send a request; its news come to `inbox`. While the engine is being replaced it waits for the new one,
        which gets all that is in flight: a caller who wants to be refused then asks for the state before."""
        request = InFlight(submit, inbox, position, array("i", submit.resumed))
        self.adopt(request)
        return request

    def adopt(self, request: InFlight, expects_cached: int = 0) -> None:
        """Take a request over: a new one, or one that another engine has begun."""
        self.in_flight[request.submit.request_id] = request
        if self.state == "ready":
            self._send(request.as_it_is_now(expects_cached))

    def release(self, request_id: str) -> InFlight:
        """Give a request away: its engine computes it no more, and nothing more of it is heard."""
        request = self.in_flight.pop(request_id)
        if self._child is not None:
            self.leaving.add(request_id)
            self._send(Abort(request_id))
        return request

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; its Finished comes with the engine's next step."""
        request = self.in_flight.get(request_id)
        if request is None:
            return
        if self.state == "ready":
            self._send(Abort(request_id))
        else:
            self._fail([request], "the request was aborted while the engine was not running")

    async def block_map(self) -> BlockMap:
        """Who holds which KV block, as of the engine's next step."""
        answer: asyncio.Future[BlockMap] = asyncio.get_running_loop().create_future()
        self._block_maps.append(answer)
        self._send(InspectBlocks())
        return await answer

    async def load_adapter(self, adapter: ServedAdapter) -> AdapterReport | None:
        """None: the engine is being replaced, and the next one begins with it."""
        if self.state != "ready":
            return None
        answer = self._adapter_answers[adapter.key] = asyncio.get_running_loop().create_future()
        self._send(_load_order(adapter))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.cancelled():
                return None
            raise
        finally:
            self._adapter_answers.pop(adapter.key, None)

    def drop_adapter(self, key: str) -> None:
        """No request that uses it is in flight."""
        if self.state == "ready":
            self._send(DropAdapter(key))

    def _send(self, command: Command) -> None:
        if self._child is not None:
            self.sent += isinstance(command, Submit)
            self._child.send(command)

    def _fail(self, requests: list[InFlight], message: str) -> None:
        for request in requests:
            self._end(request, Failure(message))

    def _end(self, request: InFlight, end: Finished | Failure) -> None:
        if self.in_flight.pop(request.submit.request_id, None) is not None:
            if self._observer is not None:
                self._observer.on_end(request, end)
            request.inbox.put(request.position, end)

    # -- what the engine says -----------------------------------------------------------------------------
    def take_report(self, report: Report) -> None:
        if isinstance(report, EngineProgress):
            self.stats = report.stats
            self._reports += self.settings.config.role == "prefill"
            now_s = time.perf_counter()
            told: list[tuple[InFlight, Delta]] = []
            for delta in report.deltas:
                request = self.in_flight.get(delta.request_id)
                if request is not None:
                    request.note(delta)
                    request.inbox.put(request.position, delta)
                    told.append((request, delta))
            self._unobserved.append((told, now_s, report.stats))
            ends: list[tuple[str, Finished | Failure]] = [*report.failed]
            ends += [(finished.request_id, finished) for finished in report.finished]
            if ends:
                self._observe()  # first: whoever is told of an end knows all tokens by then
            for request_id, end in ends:
                self.leaving.discard(request_id)
                if (ended := self.in_flight.get(request_id)) is not None:
                    self._end(ended, end)
            # After the streams that were just woken: their clients wait, whoever counts does not.
            asyncio.get_running_loop().call_soon(self._observe)
        elif isinstance(report, BlockMap):
            for answer in self._block_maps:
                if not answer.done():
                    answer.set_result(report)
            self._block_maps.clear()
        elif isinstance(report, AdapterReport):
            if report.ledger is not None and self.info is not None:
                self.info = msgspec.structs.replace(self.info, ledger=report.ledger)
            asked = self._adapter_answers.get(report.key)
            if asked is not None and not asked.done():
                asked.set_result(report)
        elif isinstance(report, Fatal):
            log.error("the engine ends: %s", report.message)
            self.last_failure = report.message

    def _observe(self) -> None:
        """Tell the observer all it has not been told, in order: the next report may come before its turn."""
        unobserved, self._unobserved = self._unobserved, []
        observer = self._observer
        if observer is None:
            return
        for told, now_s, stats in unobserved:
            for request, delta in told:
                observer.on_delta(request, delta, now_s)
            if self._fleet is None:
                observer.on_progress(stats)
            else:
                self._fleet.on_progress(self, stats)

    # -- what becomes of the engine -----------------------------------------------------------------------
    def _catch_up(self, told: set[str]) -> None:
        """Adapters that came and went while the engine started."""
        registry = self.settings.adapters
        for key in told - set(registry.all):
            self._send(DropAdapter(key))
        for key, adapter in registry.all.items():
            if key not in told:
                self._send(_load_order(adapter))

    def _note_lost_adapters(self, info: Ready) -> None:
        for lost in (report for report in info.adapters if report.error):
            log.error("%s could not load an adapter again: %s", self.settings.who, lost.error)
            if self._fleet is None and lost.key in self.settings.adapters.all:
                adapter = self.settings.adapters.all[lost.key]
                adapter.ready, adapter.error = False, lost.error

    def _on_loss(self, trouble: Trouble) -> None:
        who, count = self.settings.who, len(self.in_flight)
        if trouble.planned:
            log.info("%s %s; %d requests are in flight", who, trouble.words, count)
        else:
            log.error("%s %s; %d requests were in flight; restarting it", who, trouble.words, count)
            self._fail_hopeless()
        if self._fleet is not None:
            self._fleet.take_over(self, trouble)
        for asked in self._block_maps:
            asked.cancel()
        for loading in self._adapter_answers.values():
            loading.cancel()
        self._block_maps.clear()

    def _fail_hopeless(self) -> None:
        """Requests that cannot be continued, or may be what ends engines."""
        for request in list(self.in_flight.values()):
            tokens = len(request.streamed)
            if not request.can_go_on:
                told = f"after {tokens} streamed tokens of several samples, so it could not be retried"
            elif request.resubmitted_at >= tokens:
                told = "and again when it was retried"
            else:
                request.resubmitted_at = tokens
                continue
            self._fail([request], f"{self.last_failure} while this request ran, {told}; send it again")

    def _on_failed_start(self, error: EngineStartError) -> None:
        message = f"{self.last_failure} and did not come back: {error}"
        self._fail(list(self.in_flight.values()), message)
        if self._fleet is not None or self.last_failure is None:
            self.last_failure = str(error)
        if self._fleet is not None:
            self._fleet.on_failed_start(self, message)


def _load_order(adapter: ServedAdapter) -> LoadAdapter:
    return LoadAdapter(adapter.key, adapter.name, adapter.folder)
