"""EngineClient: the API process's side of the engine. Requests go out, and what the engine says goes into their
inboxes. Its EngineSupervisor keeps the engine alive.

No request is lost: each ends with Finished or with a Failure. When the engine is restarted, requests in flight
are submitted again, to another engine of its fleet where there is one. A stream continues after the tokens that
its client has; a request that ends two engines without a token in between fails and says why.
"""

import asyncio
import logging
import time
from array import array
from typing import Protocol

import msgspec

from cumulo.engine.outputs import Delta
from cumulo.serve.adapter_registry import ServedAdapter
from cumulo.serve.engine_link.engine_child import EngineStartError
from cumulo.serve.engine_link.engine_supervisor import (
    EngineSettings,
    EngineSupervisor,
    State,
    Trouble,
    load_order,
)
from cumulo.serve.engine_link.in_flight import Inbox, InFlight, Observer
from cumulo.serve.engine_link.messages import (
    Abort,
    AdapterReport,
    BlockMap,
    Command,
    DropAdapter,
    EngineProgress,
    Failure,
    Fatal,
    Finished,
    InspectBlocks,
    Ready,
    Report,
    Stats,
    Submit,
)

log = logging.getLogger(__name__)


class EngineFleet(Protocol):
    """The fleet of an engine, as the engine's client sees it."""

    def take_over(self, client: "EngineClient", trouble: Trouble) -> None:
        """Continues the requests of an engine that is gone elsewhere."""
        ...

    def on_ready(self, client: "EngineClient") -> None: ...

    def on_failed_start(self, client: "EngineClient", message: str) -> None: ...


class EngineClient:
    def __init__(
        self, settings: EngineSettings, observer: Observer | None = None, fleet: EngineFleet | None = None
    ) -> None:
        """`observer`: None for an engine that has no requests of its own."""
        self.settings, self._observer, self._fleet = settings, observer, fleet
        self._supervisor = EngineSupervisor(settings, self)
        self.info: Ready | None = None
        self.stats: Stats | None = None
        self.in_flight: dict[str, InFlight] = {}
        self.leaving: set[str] = set()  # requests given away whose end the engine has not told yet
        self.sent = 0  # Submit commands given to the present child
        self._unobserved: list[tuple[list[tuple[InFlight, Delta]], float, Stats]] = []
        self._block_maps: list[asyncio.Future[BlockMap]] = []
        self._adapter_answers: dict[str, asyncio.Future[AdapterReport]] = {}  # by key
        self._reports = 0  # of a prefill engine, whose work this process does not know: silent is dead

    @property
    def state(self) -> State:
        return self._supervisor.state

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def last_failure(self) -> str | None:
        return self._supervisor.last_failure

    @property
    def engine_pids(self) -> tuple[int, ...]:
        child = self._supervisor.child
        return (child.pid,) if child is not None else ()

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
        await self._supervisor.start()
        assert self.info is not None
        return self.info

    async def start_until_up(self) -> Ready:
        """As `start`, but an engine that does not come up is tried again."""
        await self._supervisor.start_until_up()
        assert self.info is not None
        return self.info

    def ask_for_restart(self) -> None:
        """Replace the engine by a new one; what is still in flight is continued."""
        self._supervisor.ask_for_restart()

    async def close(self) -> None:
        """Stop the engine. Requests still in flight fail; drain first if they should not."""
        await self._supervisor.stop_watching()
        self._fail(list(self.in_flight.values()), "the server is shutting down")
        await self._supervisor.close()

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
        if self._supervisor.child is not None:
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
        self._send(load_order(adapter))
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
        child = self._supervisor.child
        if child is not None:
            self.sent += isinstance(command, Submit)
            child.send(command)

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
            self._supervisor.last_failure = report.message

    def _observe(self) -> None:
        """Tell the observer all it has not been told, in order: the next report may come before its turn."""
        unobserved, self._unobserved = self._unobserved, []
        observer = self._observer
        if observer is None:
            return
        for told, now_s, stats in unobserved:
            for request, delta in told:
                observer.on_delta(request, delta, now_s)
            observer.on_progress(stats)

    # -- what becomes of the engine: its supervisor's EngineOwner -----------------------------------------
    def progress(self) -> tuple[int, ...] | None:
        """Steps, guides that were compiled, words with other engines."""
        if not self.in_flight and self.settings.config.role != "prefill":
            return None
        stats = self.stats
        if stats is None:
            return 0, 0, self._reports
        heard = stats.transfers.heard if stats.transfers is not None else 0
        return stats.steps, stats.guides_checked, heard + self._reports

    def on_start(self, info: Ready, adapters: set[str]) -> None:
        self.info, self.stats, self.sent = info, None, 0
        self.leaving.clear()
        self._catch_up(adapters)
        if self._supervisor.supervising:
            self._note_lost_adapters(info)
        if self._block_maps:  # asked for while there was no engine
            self._send(InspectBlocks())
        if self._fleet is not None:
            self._fleet.on_ready(self)

    def _catch_up(self, told: set[str]) -> None:
        """Adapters that came and went while the engine started."""
        registry = self.settings.adapters
        for key in told - set(registry.all):
            self._send(DropAdapter(key))
        for key, adapter in registry.all.items():
            if key not in told:
                self._send(load_order(adapter))

    def _note_lost_adapters(self, info: Ready) -> None:
        for lost in (report for report in info.adapters if report.error):
            log.error("%s could not load an adapter again: %s", self.settings.who, lost.error)
            if self._fleet is None and lost.key in self.settings.adapters.all:
                adapter = self.settings.adapters.all[lost.key]
                adapter.ready, adapter.error = False, lost.error

    def on_loss(self, trouble: Trouble) -> None:
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

    def on_failed_start(self, error: EngineStartError) -> None:
        message = f"{self.last_failure} and did not come back: {error}"
        self._fail(list(self.in_flight.values()), message)
        if self._fleet is not None or self.last_failure is None:
            self._supervisor.last_failure = str(error)
        if self._fleet is not None:
            self._fleet.on_failed_start(self, message)

    def on_replaced(self) -> None:
        if self._fleet is None:
            log.warning("%s is back; %d requests are submitted again", self.settings.who, len(self.in_flight))
            for request in self.in_flight.values():
                self._send(request.as_it_is_now())
