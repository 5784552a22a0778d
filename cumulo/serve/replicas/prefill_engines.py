"""PrefillEngines: the engines of a fleet that compute prompts for its replicas. Owned by Fleet.

This process only starts and supervises them. Which prompt goes to which of them, and what happens when one dies, is
decided by the replicas' own schedulers, which reach them directly (engine/decide/transfer.py).
"""

import asyncio
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cumulo.fleet.decide.scaling import ReplicaLife
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.engine_settings import EngineSettings, settings_of_replica
from cumulo.serve.http.listening import wait_while
from cumulo.serve.replicas.replica import FleetReplica

_PATIENCE_S = 10.0  # with an engine that always has something to do, before it ends all the same


class PrefillEngines:
    def __init__(
        self,
        settings: EngineSettings,
        count: int,
        size: int,
        most: int,
        keep: Callable[[Coroutine[Any, Any, Any]], None],
    ) -> None:
        """`size`: all engines of the fleet, which share the machine; `most`: of these engines, later; `keep`: runs
        in the background."""
        self._settings, self._size, self._keep = settings, size, keep
        self._gone_restarts = 0  # of engines that were dismissed
        self._folder = Path(tempfile.mkdtemp(prefix="cumulo-", dir="/tmp"))  # only this user may enter it
        self.addresses = {
            f"prefill-{number}": f"unix:{self._folder}/{number}.sock" for number in range(max(count, most))
        }
        self.engines: dict[str, FleetReplica] = {}
        for _ in range(count):
            self.make()

    def make(self) -> FleetReplica | None:
        """A new engine at a free address, not started yet; None: all addresses are taken."""
        for number, (name, address) in enumerate(self.addresses.items()):
            if name in self.engines:
                continue
            settings, size = self._settings, self._size
            config = dataclasses.replace(settings.config, role="prefill", transfer_address=address)
            own = dataclasses.replace(settings, config=config)
            # Numbered from the end: replicas are numbered from the beginning.
            shared = settings_of_replica(own, name, size - 1 - number, size)
            client = EngineClient(dataclasses.replace(shared, for_router=False))
            engine = self.engines[name] = FleetReplica(name, client)
            return engine
        return None

    async def dismiss(self, name: str) -> None:
        """Stop an engine; its address is free when it is gone."""
        client = self.engines[name].client
        await client.close()
        self._gone_restarts += client.restarts
        del self.engines[name]

    # -- engines that an autoscaler starts and ends ---------------------------------------------------------
    def lives(self) -> list[ReplicaLife]:
        return [one.life() for one in self.engines.values() if not one.busy_with]

    def start_another(self) -> None:
        engine = self.make()
        if engine is not None:  # None: all that there may be are there, some of them on their way out
            self._keep(engine.client.start_until_up())

    def take_back(self, name: str) -> None:
        self.engines[name].draining = False

    def retire(self, name: str) -> None:
        """A prompt that a replica orders in the moment in which it ends is computed by another, or by the
        replica."""
        self.engines[name].draining = True
        self._keep(self._end_when_idle(self.engines[name]))

    async def _end_when_idle(self, engine: FleetReplica) -> None:
        await wait_while(
            lambda: engine.draining and (engine.client.state != "ready" or engine.unfinished > 0), _PATIENCE_S
        )
        if engine.draining:  # it may have been taken back
            engine.busy_with = "removed"  # from here on it cannot be
            await self.dismiss(engine.name)

    def settings_of_decode(self, settings: EngineSettings) -> EngineSettings:
        """Of a replica, which is told where these engines are; it works while they are not there yet."""
        engines = tuple(f"{name}={address}" for name, address in self.addresses.items())
        config = dataclasses.replace(settings.config, role="decode", prefill_engines=engines)
        return dataclasses.replace(settings, config=config)

    @property
    def restarts(self) -> int:
        return self._gone_restarts + sum(one.client.restarts for one in self.engines.values())

    async def start(self) -> None:
        """One after the other: each plans its memory with what the ones before have left."""
        for engine in list(self.engines.values()):
            await engine.client.start_until_up()

    async def close(self) -> None:
        await asyncio.gather(*(one.client.close() for one in self.engines.values()))
        shutil.rmtree(self._folder, ignore_errors=True)
