"""PrefillEngines: the engines of a fleet that compute prompts for its replicas. Owned by Fleet.

This process only starts and supervises them. Which prompt goes to which of them, and what happens when one dies, is
decided by the replicas' own schedulers, which reach them directly (engine/decide/transfer.py).
"""

import asyncio
import dataclasses
import shutil
import tempfile
from pathlib import Path

from cumulo.engine.outputs import Delta
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.engine_supervisor import EngineSettings
from cumulo.serve.engine_link.in_flight import Failure, InFlight
from cumulo.serve.engine_link.machine_share import settings_of_replica
from cumulo.serve.engine_link.messages import Finished, Stats


class PrefillEngines:
    def __init__(self, settings: EngineSettings, count: int, size: int, most: int = 0) -> None:
        """`size`: all engines of the fleet, which share the machine; `most`: of these engines, later."""
        self._settings, self._size = settings, size
        self._gone_restarts = 0  # of engines that were dismissed
        self._folder = Path(tempfile.mkdtemp(prefix="cumulo-", dir="/tmp"))  # only this user may enter it
        self.addresses = {
            f"prefill-{number}": f"unix:{self._folder}/{number}.sock" for number in range(max(count, most))
        }
        self.clients: dict[str, EngineClient] = {}
        for _ in range(count):
            self.make()

    def make(self) -> tuple[str, EngineClient] | None:
        """A new engine at a free address, not started yet; None: all addresses are taken."""
        for number, (name, address) in enumerate(self.addresses.items()):
            if name in self.clients:
                continue
            settings, size = self._settings, self._size
            config = dataclasses.replace(settings.config, role="prefill", transfer_address=address)
            own = dataclasses.replace(settings, config=config)
            # Numbered from the end: replicas are numbered from the beginning.
            shared = settings_of_replica(own, name, size - 1 - number, size)
            client = EngineClient(dataclasses.replace(shared, for_router=False), _Silence())
            self.clients[name] = client
            return name, client
        return None

    async def dismiss(self, name: str) -> None:
        """Stop an engine; its address is free when it is gone."""
        client = self.clients[name]
        await client.close()
        self._gone_restarts += client.restarts
        del self.clients[name]

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


class _Silence:
    """An Observer of engines that have no requests of their own."""

    def on_progress(self, stats: Stats) -> None:
        pass

    def on_delta(self, request: InFlight, delta: Delta, now_s: float) -> None:
        pass

    def on_end(self, request: InFlight, end: Finished | Failure) -> None:
        pass
