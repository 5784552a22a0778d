"""EngineSupervisor: starts an engine process, watches it, and replaces one that died or stands still. Owned by
EngineClient, which knows the requests and is told what becomes of the engine.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cumulo.base.machine import gpus_here
from cumulo.engine.config import EngineConfig
from cumulo.serve.adapter_registry import AdapterRegistry, ServedAdapter
from cumulo.serve.engine_link.engine_child import EngineChild, EngineStartError
from cumulo.serve.engine_link.messages import EngineJob, LoadAdapter, Ready, Report, Shutdown

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
    adapters: AdapterRegistry = field(
        default_factory=lambda: AdapterRegistry(0)
    )  # that an engine begins with

    @property
    def who(self) -> str:
        """The engine, in messages."""
        return f"the engine process of replica {self.name}" if self.name else "the engine process"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why an engine is replaced. `planned`: somebody asked for it, and no request is to blame."""

    words: str
    planned: bool = False


class EngineOwner(Protocol):
    """What a supervisor needs of the EngineClient whose engine it keeps alive."""

    def take_report(self, report: Report) -> None: ...

    def progress(self) -> tuple[int, ...] | None:
        """What grows while the engine is alive; None: it has no work, and may stand still."""
        ...

    def on_start(self, info: Ready, adapters: set[str]) -> None:
        """A new engine is up. It was told of the adapters with these keys."""
        ...

    def on_loss(self, trouble: Trouble) -> None: ...

    def on_failed_start(self, error: EngineStartError) -> None: ...

    def on_replaced(self) -> None:
        """The engine that took the place of a lost one is up."""
        ...


class EngineSupervisor:
    def __init__(self, settings: EngineSettings, owner: EngineOwner) -> None:
        self._settings, self._owner = settings, owner
        self.state: State = "starting"
        self.child: EngineChild | None = None
        self.restarts = 0
        self.last_failure: str | None = None
        self._restart_asked = False
        self._task: asyncio.Task[None] | None = None

    @property
    def supervising(self) -> bool:
        """Has a first engine come up?"""
        return self._task is not None

    async def start(self) -> None:
        """Start the engine and wait until its model is loaded; raises EngineStartError."""
        await self._start_child(needs_adapters=True)
        self._task = asyncio.create_task(self._supervise())

    async def start_until_up(self) -> None:
        """As `start`, but an engine that does not come up is tried again."""
        await self._bring_up()
        self._task = asyncio.create_task(self._supervise())

    def ask_for_restart(self) -> None:
        self._restart_asked = True

    async def stop_watching(self) -> None:
        self.state = "stopped"
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def close(self) -> None:
        """Stop the engine, which nobody watches any more."""
        if self.child is not None:
            self.child.send(Shutdown())
            await self.child.end(patience_s=3.0)
            self.child = None

    # -- starting -----------------------------------------------------------------------------------------
    async def _start_child(self, needs_adapters: bool = False) -> None:
        settings = self._settings
        told = [load_order(adapter) for adapter in settings.adapters.all.values()]
        job = EngineJob(
            model=settings.model,
            # Where requests without a seed draw theirs: a server that restarts must not repeat itself.
            config=dataclasses.replace(settings.config, seed=secrets.randbits(63)),
            log_level=settings.log_level,
            for_router=settings.for_router,
            adapters=told,
            needs_adapters=needs_adapters,
        )
        child = self.child = EngineChild(job, settings.environment)
        try:
            info = await child.ready(settings.start_timeout_s)
        except BaseException:
            self.child = None
            await child.end()
            raise
        self.state = "ready"
        self._owner.on_start(info, {order.key for order in told})

    async def _bring_up(self) -> None:
        """Start an engine, trying again until one comes up."""
        pause_s = 0.5
        while True:
            try:
                await self._start_child()
                return
            except EngineStartError as error:
                log.error("%s does not come up: %s; next attempt in %g s", self._settings.who, error, pause_s)
                self._owner.on_failed_start(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    # -- watching -----------------------------------------------------------------------------------------
    async def _supervise(self) -> None:
        """Read what the engine says; when it dies or stands still, bring a new one up. Until cancelled."""
        while True:
            child = self.child
            assert child is not None
            child.listen(self._owner.take_report)
            try:
                trouble = await self._watch(child)
            finally:
                child.stop_listening()
            await self._replace(child, trouble)

    async def _watch(self, child: EngineChild) -> Trouble:
        """Returns what is wrong, as soon as something is."""
        loop = asyncio.get_running_loop()
        timeout_s = self._settings.stall_timeout_s
        still_s, ticked_s = 0.0, loop.time()
        seen: tuple[int, ...] | None = None
        while True:
            await child.ended(_TICK_S)
            now_s = loop.time()
            if child.misunderstood is not None:
                return Trouble(f"said something that cannot be understood ({child.misunderstood!r})")
            if (death := child.death) is not None:
                return Trouble(death)
            if self._restart_asked:
                return Trouble("is restarted as asked", planned=True)
            done = self._owner.progress()
            # Counted in ticks, so that a machine that slept does not blame the engine.
            still_s = 0.0 if done is None or done != seen else still_s + min(now_s - ticked_s, 2 * _TICK_S)
            seen, ticked_s = done, now_s
            if still_s >= timeout_s:
                return Trouble(f"finished no step for {timeout_s:g} s although it had work")

    async def _replace(self, child: EngineChild, trouble: Trouble) -> None:
        self.state, self.child = "restarting", None
        self._restart_asked = False
        if not trouble.planned:
            self.restarts += 1
            self.last_failure = f"{self._settings.who} {trouble.words}"
        if child.misunderstood is None:
            for report in child.reports():  # what it said before it died
                self._owner.take_report(report)
        self._owner.on_loss(trouble)
        child.send(Shutdown())
        await child.end(patience_s=2.0 if trouble.planned else 0.0)
        await self._bring_up()
        self._owner.on_replaced()


def load_order(adapter: ServedAdapter) -> LoadAdapter:
    return LoadAdapter(adapter.key, adapter.name, adapter.folder)


def settings_of_replica(settings: EngineSettings, name: str, number: int, replicas: int) -> EngineSettings:
    """CPU threads are divided among the replicas unless their number is given; GPUs are dealt out in turn, as
    many to each as it has ranks."""
    config, environment = settings.config, dict(settings.environment)
    if config.threads is None:
        config = dataclasses.replace(config, threads=max(1, len(os.sched_getaffinity(0)) // replicas))
    gpus, ranks = gpus_here() if config.device != "cpu" else [], config.layout.world
    if gpus:
        own = [gpus[(number * ranks + rank) % len(gpus)] for rank in range(min(ranks, len(gpus)))]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return dataclasses.replace(settings, config=config, environment=environment, name=name, for_router=True)
