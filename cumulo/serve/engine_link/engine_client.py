"""EngineClient: the API process's side of the engine. Requests go out, what the engine says goes into their
inboxes, and a supervisor restarts an engine that died or stands still.

No request is lost: each ends with Finished or with a Failure. When the engine is restarted, requests in flight are
submitted again, to another engine of its fleet where there is one. A stream continues after the tokens that its
client has; a request that ends two engines without a token in between fails and says why.
"""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import shutil
import tempfile
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from cumulo.engine.config import EngineConfig
from cumulo.engine.outputs import Delta
from cumulo.serve.adapters.shelf import AdapterShelf, ServedAdapter
from cumulo.serve.engine_link.engine_child import EngineChild, EngineStartError, socket_folder_fits
from cumulo.serve.engine_link.in_flight import Failure, Inbox, InFlight, Observer, failure_of
from cumulo.serve.engine_link.messages import (
    Abort,
    AdapterReport,
    BlockMap,
    Command,
    DropAdapter,
    EngineJob,
    EngineProgress,
    Fatal,
    Finished,
    InspectBlocks,
    LoadAdapter,
    Ready,
    Rejected,
    Report,
    Shutdown,
    Stats,
    Submit,
)

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "stopped"]
_TICK_S = 0.2
_LONGEST_PAUSE_S = 30.0  # between attempts to bring an engine back


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    stall_timeout_s: float = 60.0  # has work, finishes no step for this long: dead
    start_timeout_s: float = 900.0
    log_level: str = "info"
    name: str = ""  # of the replica, in messages; empty: it is the only one
    environment: Mapping[str, str] = field(default_factory=dict)  # of its process, beside this one's
    for_router: bool = False
    adapters: AdapterShelf = field(default_factory=lambda: AdapterShelf(0))  # that an engine begins with


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why an engine is replaced. `planned`: somebody asked for it, and no request is to blame."""

    words: str
    planned: bool = False


class Relatives(Protocol):
    """The fleet of an engine, as the engine's client sees it."""

    def take_over(self, client: "EngineClient", trouble: Trouble) -> None:
        """Its engine is gone: continue its requests elsewhere."""
        ...

    def on_ready(self, client: "EngineClient") -> None: ...

    def on_failed_start(self, client: "EngineClient", message: str) -> None: ...


class EngineClient:
    def __init__(
        self, settings: EngineSettings, observer: Observer, relatives: Relatives | None = None
    ) -> None:
        self.settings, self._observer, self._relatives = settings, observer, relatives
        self.state: State = "starting"
        self.info: Ready | None = None
        self.stats: Stats | None = None
        self.restarts = 0
        self.last_failure: str | None = None
        self.in_flight: dict[str, InFlight] = {}
        self.leaving: set[str] = set()  # requests given away whose end the engine has not told yet
        self.sent = 0  # Submit commands given to the present child
        self._unobserved: list[tuple[list[tuple[InFlight, Delta]], float, Stats]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="cumulo-"))  # only this user may enter it
        if not socket_folder_fits(self._folder):
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix="cumulo-", dir="/tmp"))
        self._children = 0
        self._child: EngineChild | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._block_maps: list[asyncio.Future[BlockMap]] = []
        self._adapter_answers: dict[str, asyncio.Future[AdapterReport]] = {}  # by key
        self._restart_asked = asyncio.Event()
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
        await self._start_child(needs_adapters=True)
        return self._begin()

    async def start_until_up(self) -> Ready:
        """As `start`, but an engine that does not come up is tried again."""
        await self._bring_up()
        return self._begin()

    def _begin(self) -> Ready:
        self._tasks.append(asyncio.create_task(self._supervise()))
        assert self.info is not None
        return self.info

    def ask_for_restart(self) -> None:
        """Replace the engine by a new one; what is still in flight is continued."""
        self._restart_asked.set()

    async def _start_child(self, needs_adapters: bool = False) -> None:
        self._children += 1
        told = [_order(adapter) for adapter in self.settings.adapters.all.values()]
        job = EngineJob(
            model=self.settings.model,
            # Where requests without a seed draw theirs: a server that restarts must not repeat itself.
            config=dataclasses.replace(self.settings.config, seed=secrets.randbits(63)),
            address=f"{self._folder}/engine-{self._children}.sock",
            log_level=self.settings.log_level,
            for_router=self.settings.for_router,
            adapters=told,
            needs_adapters=needs_adapters,
        )
        child = self._child = EngineChild(job, self.settings.environment)
        try:
            self.info = await child.ready(self.settings.start_timeout_s)
        except BaseException:
            self._child = None
            await child.end()
            raise
        self.stats, self.sent = None, 0
        self.leaving.clear()
        self.state = "ready"
        self._catch_up({order.key for order in told})
        for lost in (report for report in self.info.adapters if report.error and self._tasks):
            log.error("%s could not load an adapter again: %s", self._who, lost.error)
            if self._relatives is None and lost.key in self.settings.adapters.all:
                adapter = self.settings.adapters.all[lost.key]
                adapter.ready, adapter.error = False, lost.error

    def _catch_up(self, told: set[str]) -> None:
        """Adapters that came and went while the engine started."""
        shelf = self.settings.adapters
        for key in told - set(shelf.all):
            self._send(DropAdapter(key))
        for key, adapter in shelf.all.items():
            if key not in told:
                self._send(_order(adapter))

    async def close(self) -> None:
        """Stop the engine. Requests still in flight fail; drain first if they should not."""
        self.state = "stopped"
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._fail(list(self.in_flight.values()), "the server is shutting down")
        if self._child is not None:
            self._child.send(Shutdown())
            await self._child.end(patience_s=3.0)
            self._child = None
        shutil.rmtree(self._folder, ignore_errors=True)

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
        self._send(_order(adapter))
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
            self._observer.on_end(request, end)
            request.inbox.put(request.position, end)

    # -- what the engine says -----------------------------------------------------------------------------
    def _take(self, report: Report) -> None:
        if isinstance(report, EngineProgress):
            self.stats = report.stats
            self._reports += self.settings.config.role == "prefill"
            now_s = time.perf_counter()
            told: list[tuple[InFlight, Delta]] = []
            for delta in report.deltas:
                request = self.in_flight.get(delta.request_id)
                if request is not None:
                    request.note(delta)
                    request.inbox.put_delta(request.position, delta)
                    told.append((request, delta))
            self._unobserved.append((told, now_s, report.stats))
            if report.finished:
                self._observe()  # first: whoever is told of an end knows all tokens by then
            for finished in report.finished:
                self.leaving.discard(finished.request_id)
                ended = self.in_flight.get(finished.request_id)
                if ended is not None:
                    self._end(ended, failure_of(finished) if finished.error else finished)
            # After the streams that were just woken: their clients wait, whoever counts does not.
            asyncio.get_running_loop().call_soon(self._observe)
        elif isinstance(report, Rejected):
            self.leaving.discard(report.request_id)
            refused = self.in_flight.get(report.request_id)
            if refused is not None:
                later = report.busy or report.retry_after_s is not None
                failure = Failure(
                    report.message, not later, report.of_guide, report.busy, report.retry_after_s
                )
                self._end(refused, failure)
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
        for told, now_s, stats in unobserved:
            for request, delta in told:
                self._observer.on_delta(request, delta, now_s)
            self._observer.on_progress(stats)

    # -- supervision --------------------------------------------------------------------------------------
    async def _supervise(self) -> None:
        """Read what the engine says; when it dies or stands still, bring a new one up. Until cancelled."""
        while True:
            child = self._child
            assert child is not None
            child.listen(self._take)
            try:
                trouble = await self._watch(child)
            finally:
                child.deafen()
            await self._replace(trouble)

    async def _watch(self, child: EngineChild) -> Trouble:
        """Returns what is wrong, as soon as something is."""
        loop = asyncio.get_running_loop()
        still_s, seen, ticked_s = 0.0, (-1, -1, -1), loop.time()
        while True:
            await child.ended(_TICK_S)
            now_s = loop.time()
            if child.misunderstood is not None:
                return Trouble(f"said something that cannot be understood ({child.misunderstood!r})")
            if (death := child.death) is not None:
                return Trouble(death)
            if self._restart_asked.is_set():
                return Trouble("is restarted as asked", planned=True)
            stats = self.stats
            done = _progress(stats, self._reports)
            if (self.in_flight or self.settings.config.role == "prefill") and done == seen:
                # Counted in ticks, so that a machine that slept does not blame the engine.
                still_s += min(now_s - ticked_s, 2 * _TICK_S)
            else:
                still_s, seen = 0.0, done
            ticked_s = now_s
            if still_s >= self.settings.stall_timeout_s:
                return Trouble(
                    f"finished no step for {self.settings.stall_timeout_s:g} s although it had work"
                )

    async def _replace(self, trouble: Trouble) -> None:
        self.state = "restarting"
        self._restart_asked.clear()
        if trouble.planned:
            log.info("%s %s; %d requests are in flight", self._who, trouble.words, len(self.in_flight))
        else:
            self.restarts += 1
            self.last_failure = f"{self._who} {trouble.words}"
            log.error("%s; %d requests were in flight; restarting it", self.last_failure, len(self.in_flight))
        assert self._child is not None
        child, self._child = self._child, None
        if child.misunderstood is None:
            for report in child.reports():  # what it said before it died
                self._take(report)
        if not trouble.planned:
            self._fail_hopeless()
        if self._relatives is not None:
            self._relatives.take_over(self, trouble)
        child.send(Shutdown())
        await child.end(patience_s=2.0 if trouble.planned else 0.0)
        for answer in self._block_maps:
            answer.cancel()
        for loading in self._adapter_answers.values():
            loading.cancel()
        self._block_maps.clear()
        await self._bring_up()
        if self._relatives is not None:
            return
        log.warning("%s is back; %d requests are submitted again", self._who, len(self.in_flight))
        for request in self.in_flight.values():
            self._send(request.as_it_is_now())

    @property
    def _who(self) -> str:
        return (
            f"the engine process of replica {self.settings.name}"
            if self.settings.name
            else "the engine process"
        )

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

    async def _bring_up(self) -> None:
        """Start an engine, trying again until one comes up."""
        pause_s = 0.5
        while True:
            try:
                await self._start_child()
                break
            except EngineStartError as error:
                log.error("%s does not come up: %s; next attempt in %g s", self._who, error, pause_s)
                message = f"{self.last_failure} and did not come back: {error}"
                self._fail(list(self.in_flight.values()), message)
                if self._relatives is not None:
                    self.last_failure = str(error)
                    self._relatives.on_failed_start(self, message)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if self._relatives is not None:
            self._relatives.on_ready(self)


def _order(adapter: ServedAdapter) -> LoadAdapter:
    return LoadAdapter(adapter.key, adapter.name, adapter.folder)


def _progress(stats: Stats | None, reports: int) -> tuple[int, int, int]:
    """What grows while an engine is alive: steps, guides that were compiled, words with other engines."""
    if stats is None:
        return 0, 0, reports
    heard = stats.transfers.heard if stats.transfers is not None else 0
    return stats.steps, stats.guides_checked, heard + reports
