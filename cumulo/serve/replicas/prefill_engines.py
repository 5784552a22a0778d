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
from typing import Any, Literal

from cumulo.fleet.decide.scaling import ReplicaLife
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.engine_settings import EngineSettings, settings_of_replica

_LOOK_S = 0.05
_PATIENCE = 200  # looks at an engine that always has something to do, before it ends all the same


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
        self._draining: set[str] = set()
        self._closing: set[str] = set()  # of these, that cannot be taken back any more
        self._gone_restarts = 0  # of engines that were dismissed
        self._folder = Path(tempfile.mkdtemp(prefix="cumulo-", dir="/tmp"))  # only this user may enter it
        self.addresses = {
            f"prefill-{number}": f"unix:{self._folder}/{number}.sock" for number in range(max(count, most))
        }
        self.clients: dict[str, EngineClient] = {}
        for _ in range(count):
            self.make()

    def make(self) -> EngineClient | None:
        """A new engine at a free address, not started yet; None: all addresses are taken."""
        for number, (name, address) in enumerate(self.addresses.items()):
            if name in self.clients:
                continue
            settings, size = self._settings, self._size
            config = dataclasses.replace(settings.config, role="prefill", transfer_address=address)
            own = dataclasses.replace(settings, config=config)
            # Numbered from the end: replicas are numbered from the beginning.
            shared = settings_of_replica(own, name, size - 1 - number, size)
            client = EngineClient(dataclasses.replace(shared, for_router=False))
            self.clients[name] = client
            return client
        return None

    async def dismiss(self, name: str) -> None:
        """Stop an engine; its address is free when it is gone."""
        client = self.clients[name]
        await client.close()
        self._gone_restarts += client.restarts
        del self.clients[name]

    # -- engines that an autoscaler starts and ends ---------------------------------------------------------
    def lives(self) -> list[ReplicaLife]:
        clients = enumerate(self.clients.items())  # in the order in which they were made
        return [self._life(*one, at) for at, one in clients if one[0] not in self._closing]

    def _life(self, name: str, client: EngineClient, made: float) -> ReplicaLife:
        state: Literal["starting", "ready", "draining"] = "ready" if client.state == "ready" else "starting"
        if name in self._draining:
            state = "draining"
        return ReplicaLife(name, state, _busy(client), made)

    def start_another(self) -> None:
        client = self.make()
        if client is not None:  # None: all that there may be are there, some of them on their way out
            self._keep(client.start_until_up())

    def take_back(self, name: str) -> None:
        self._draining.discard(name)

    def retire(self, name: str) -> None:
        """A prompt that a replica orders in the moment in which it ends is computed by another, or by the
        replica."""
        self._draining.add(name)
        self._keep(self._end_when_idle(name))

    async def _end_when_idle(self, name: str) -> None:
        client = self.clients[name]
        for _ in range(_PATIENCE):
            if name not in self._draining or (client.state == "ready" and not _busy(client)):
                break
            await asyncio.sleep(_LOOK_S)
        if name in self._draining:  # it may have been taken back
            self._closing.add(name)
            await self.dismiss(name)
            self._closing.discard(name)
            self._draining.discard(name)

    def settings_of_decode(self, settings: EngineSettings) -> EngineSettings:
        """Of a replica, which is told where these engines are; it works while they are not there yet."""
        engines = tuple(f"{name}={address}" for name, address in self.addresses.items())
        config = dataclasses.replace(settings.config, role="decode", prefill_engines=engines)
        return dataclasses.replace(settings, config=config)

    @property
    def restarts(self) -> int:
        return self._gone_restarts + sum(client.restarts for client in self.clients.values())

    async def start(self) -> None:
        """One after the other: each plans its memory with what the ones before have left."""
        for client in list(self.clients.values()):
            await client.start_until_up()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients.values()))
        shutil.rmtree(self._folder, ignore_errors=True)


def _busy(client: EngineClient) -> int:
    stats = client.stats
    if stats is None:
        return 0
    sending = stats.transfers.sending if stats.transfers is not None else 0
    return stats.running + stats.waiting + sending
