"""ModelTable: the models of one server, each a Service with an engine of its own that is started for its requests.

`plan_loads` decides what is in memory; here it is carried out. A request enters when its model is loaded, and the
model stays at least until it has ended (the gate lets go of it), so no unload ends an answer.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from starlette.types import Scope

from cumulo.base.quantities import GIB
from cumulo.errors import CumuloError
from cumulo.fleet.decide.loading import LoadState, ModelView, plan_loads
from cumulo.serve.engine_link.memory_forecast import MemoryForecast, forecast
from cumulo.serve.engine_link.messages import Ready
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.model_text import ModelText
from cumulo.serve.service import HELD_SERVICE, Service, not_served

log = logging.getLogger(__name__)

LET_GO = "let_go"  # in a request's state: what ends its hold of a model
_LOOK_S = 1.0  # between two looks for models that nobody uses, and for those that were pulled meanwhile
_LATEST = ":latest"  # what Ollama's clients put behind a name that has no tag


class ServedModel:
    """A model that requests can name."""

    def __init__(self, name: str, model: str | None, keep_s: float | None) -> None:
        self.name, self.model, self.keep_s = name, model, keep_s
        self.service: Service | None = None  # made when it is loaded for the first time
        self.forecast = MemoryForecast()
        self.state: LoadState = "unloaded"
        self.running = 0
        self.removed = False  # its files are gone; the requests that it has are answered
        self.used_s = time.monotonic()

    def view(self) -> ModelView:
        return ModelView(self.forecast.need_bytes, self.state, self.running, self.used_s, self.keep_s)

    @property
    def expires_s(self) -> float:
        """How long it stays in memory without a further request."""
        stays_s = math.inf if self.keep_s is None else self.keep_s
        return max(0.0, self.used_s + stays_s - time.monotonic()) if not self.running else stays_s

    @property
    def max_context(self) -> int | None:
        info = self.service.engine.info if self.service is not None else None
        return info.max_context if info is not None else self.forecast.max_context or None


class ModelTable:
    def __init__(self, first: Service, find: Callable[[], Mapping[str, str]] | None = None) -> None:
        """`find`: the further models by name, asked again whenever a name is not known; None: there are none."""
        self.first, self._find = first, find
        options = first.options
        self.keep_s = options.models_idle_s or None
        self.budget_bytes = 0
        row = ServedModel(first.model_name, options.model, self.keep_s)
        row.service = first
        self.rows = {row.name: row}
        self._first_row = row
        self._waiting: list[tuple[ServedModel, asyncio.Future[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()  # of forecasts and services
        self.refresh()

    @property
    def several(self) -> bool:
        return self._find is not None

    @property
    def listed(self) -> dict[str, ServedModel]:
        """The models that requests can name."""
        return {name: row for name, row in self.rows.items() if not row.removed}

    @property
    def services(self) -> list[Service]:
        return [row.service for row in self.rows.values() if row.service is not None]

    @property
    def busy(self) -> int:
        """Requests that have not ended."""
        running = sum(len(one.engine.in_flight) + bool(one.unsent) for one in self.services)
        return running + len(self._waiting)

    def refresh(self) -> None:
        """Models come and go: `cumulo pull` and `cumulo remove` may run beside the server."""
        found = self._find() if self._find is not None else {}
        for name, model in found.items():
            if name not in self.rows:
                self.rows[name] = ServedModel(name, model, self.keep_s)
        for name, row in list(self.rows.items()):
            row.removed = name not in found and row is not self._first_row
            if row.removed and row.state == "unloaded":
                del self.rows[name]
                if row.service is not None:
                    row.service.text.close()

    # -- life ---------------------------------------------------------------------------------------------
    async def start(self) -> Ready:
        """Load the first model; raises CumuloError."""
        row, gib = self._first_row, self.first.options.models_memory_gib
        self.budget_bytes = int(gib * GIB) if gib is not None else 0
        if len(self.rows) > 1 or (self.several and gib is not None):
            await self.describe()
            for one in self.rows.values():
                if one.forecast.problem:
                    log.warning("%s cannot be loaded: %s", one.name, one.forecast.problem)
            if row.forecast.problem:
                raise CumuloError(row.forecast.problem)
            self._bound(row)
        row.state = "loading"
        info = await self.first.start()
        row.state, row.used_s = "loaded", time.monotonic()
        self.budget_bytes = self.budget_bytes or info.ledger["available_bytes"]
        row.forecast.take_plan(info)
        if self.several:
            self._begin(self._look_for_idle())
            self._turn()
        return info

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for service in self.services:
            await service.close()

    def abort_all(self, reason: str) -> None:
        for service in self.services:
            service.abort_all(reason)

    # -- requests -----------------------------------------------------------------------------------------
    def named(self, name: str) -> ServedModel | None:
        """The model of this name, or of the adapter's name; raises ApiError where the server has several and none
        of this name. None: the endpoints say what is wrong."""
        short = name.removesuffix(_LATEST)
        for known in (name, short):
            if self.first.adapters.named(known) is not None:
                return self._first_row
            if known not in self.rows:
                self.refresh()
            if (row := self.rows.get(known)) is not None and not row.removed:
                return row
        if self.several:
            raise not_served(name, [*self.listed, *self.first.adapters.served])
        return None

    async def enter(self, scope: Scope, body: Any) -> None:
        """Wait until the model that a request's body names is loaded, and hold it until the request has ended."""
        asked = getattr(body, "model", None)
        if not isinstance(asked, str) or not getattr(body, "loads_model", True):
            return
        if (row := self.named(asked)) is None:
            return
        if asked.removesuffix(_LATEST) == row.name:
            body.model = row.name
        keep_s = getattr(body, "keep_s", None)
        if self.several:
            row.keep_s = self.keep_s if keep_s is None else keep_s
            await self.hold(row)
            scope["state"] |= {HELD_SERVICE: row.service, LET_GO: lambda: self.let_go(row)}

    async def hold(self, row: ServedModel) -> None:
        """Load the model if it is not; it stays until `let_go`."""
        if not (row.forecast.need_bytes or row.forecast.problem):
            await self.describe()
        if problem := row.forecast.problem:
            raise invalid(f"{row.name} cannot be loaded: {problem}", "model", "model_not_loadable")
        if len(self._waiting) >= self.first.options.max_queue:
            words = f"{len(self._waiting)} requests wait for a model to be loaded already: try again later"
            raise ApiError(429, words, code="queue_full", retry_after_s=5)
        if row.state == "loaded" and not self._waiting:
            row.running += 1
            return
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, entered))
        self._turn()
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled():
                self.let_go(row)
            raise

    def let_go(self, row: ServedModel) -> None:
        row.running -= 1
        row.used_s = time.monotonic()
        if self._waiting or row.keep_s == 0:
            self._turn()

    def unload(self, row: ServedModel) -> None:
        """Free its memory as soon as none of its requests runs."""
        row.keep_s = 0.0
        self._turn()

    # -- carrying decisions out ---------------------------------------------------------------------------
    def _turn(self) -> None:
        if not self.several:
            return
        self._waiting = [one for one in self._waiting if not one[1].done()]
        views = {name: row.view() for name, row in self.rows.items()}
        if len(views) == 1 and self._first_row.keep_s == self.keep_s:
            # The only model stays, unless somebody asked for its end.
            views = {name: replace(view, keep_s=None) for name, view in views.items()}
        asked = [row.name for row, _ in self._waiting]
        plan = plan_loads(views, asked, self.budget_bytes, time.monotonic())
        for name in plan.unload:
            self.rows[name].state = "unloading"
            self._begin(self._unload(self.rows[name]))
        for name in plan.load:
            self.rows[name].state = "loading"
            self._begin(self._load(self.rows[name]))
        for place in plan.enter:
            row, entered = self._waiting[place]
            row.running += 1
            row.used_s = time.monotonic()
            entered.set_result(None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, row: ServedModel) -> None:
        began_s = time.monotonic()
        try:
            service = await self.service_of(row)
            self._bound(row)
            await service.start()
        except Exception as error:
            if not isinstance(error, CumuloError):
                log.exception("%s could not be loaded", row.name)
            row.state = "unloaded"
            refused = ApiError(503, f"{row.name} could not be loaded: {error}", code="model_not_loaded")
            for one, entered in self._waiting:
                if one is row and not entered.done():
                    entered.set_exception(refused)
        else:
            row.state, row.used_s = "loaded", time.monotonic()
            log.info("%s is loaded, in %.1f s", row.name, row.used_s - began_s)
        self._turn()

    async def _unload(self, row: ServedModel) -> None:
        assert row.service is not None
        await row.service.unload()
        row.state = "unloaded"
        log.info("%s is unloaded", row.name)
        self._turn()

    async def _look_for_idle(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.refresh()
            self._turn()

    # -- models -------------------------------------------------------------------------------------------
    async def describe(self) -> None:
        """Find out what all models are and take; one that is up takes what its engine planned."""
        async with self._lock:
            rows = [one for one in self.rows.values() if not (one.forecast.format or one.forecast.problem)]
            if not rows:
                return
            config, budget = self.first.options.engine, self.budget_bytes or None
            self.budget_bytes, found = await forecast([one.model for one in rows], config, budget)
            for row, told in zip(rows, found, strict=True):
                row.forecast = told
                if row is self._first_row and (info := self.first.engine.info) is not None:
                    told.take_plan(info)

    async def service_of(self, row: ServedModel) -> Service:
        """Its service, without its engine: what reads its files, its tokenizer and template."""
        async with self._lock:
            if row.service is None:
                row.service = await asyncio.to_thread(self._made, row)
            return row.service

    def _made(self, row: ServedModel) -> Service:
        first = self.first.options
        text = ModelText.load(row.model, parse_special_tokens=first.parse_special_tokens)
        config = replace(first.engine, max_loras=0)
        options = replace(first, model=row.model, name=row.name, lora=(), chat_template=None, engine=config)
        return Service(options, text, row.name, self.first)

    def _bound(self, row: ServedModel) -> None:
        """Its engine takes what was predicted, and no more."""
        assert row.service is not None
        engine = row.service.engine
        config = replace(engine.settings.config, kv_blocks=row.forecast.kv_blocks)
        engine.settings = replace(engine.settings, config=config)
