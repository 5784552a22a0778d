"""PrefillScaling: starts and ends a fleet's prefill engines as an autoscaling rule says. Owned by FleetAutoscaler,
for `cumulo serve --prefill 1 --autoscale 1..3,prefill=1..2`.

Replicas know the addresses of all prefill engines that there may be, and use those that answer. One that goes ends
when it computes nothing; a prompt that a replica orders in that moment is computed by another, or by the replica.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from cumulo.fleet.decide.scaling import ReplicaLife, ScaleTo, changes
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.prefill_engines import PrefillEngines

_LOOK_S = 0.05
_PATIENCE = 200  # looks at an engine that always has something to do, before it ends all the same


class PrefillScaling:
    def __init__(self, engines: PrefillEngines, keep: Callable[[Coroutine[Any, Any, Any]], None]) -> None:
        self._engines, self._keep = engines, keep
        self._leaving: set[str] = set()
        self._closing: set[str] = set()  # of these, that cannot be taken back any more
        self._order: dict[str, int] = {}
        self._orders = 0
        self.wanted: ScaleTo | None = None

    @property
    def size(self) -> int:
        return len(self._engines.clients)

    def lives(self) -> list[ReplicaLife]:
        clients = self._engines.clients.items()
        return [self._life(name, client) for name, client in clients if name not in self._closing]

    def obey(self, wanted: ScaleTo) -> tuple[int, int]:
        """How many there were, and will be; those that go not counted."""
        self.wanted, lives = wanted, self.lives()
        todo = changes(lives, wanted.replicas)
        before = sum(one.state != "draining" for one in lives)
        self._leaving -= set(todo.take_back)
        for _ in range(todo.start):
            made = self._engines.make()
            if made is not None:  # None: all that there may be are there, some of them on their way out
                self._orders += 1
                self._order[made[0]] = self._orders
                self._keep(made[1].start_until_up())
        for name in (*todo.drain, *todo.cancel):
            self._leaving.add(name)
            self._keep(self._end_when_idle(name))
        after = before + todo.start + len(todo.take_back) - len(todo.drain) - len(todo.cancel)
        return before, after

    def _life(self, name: str, client: EngineClient) -> ReplicaLife:
        state: Literal["starting", "ready", "draining"] = "ready" if client.state == "ready" else "starting"
        return ReplicaLife(
            name,
            "draining" if name in self._leaving else state,
            _busy(client),
            float(self._order.get(name, 0)),
        )

    async def _end_when_idle(self, name: str) -> None:
        client = self._engines.clients[name]
        for _ in range(_PATIENCE):
            if name not in self._leaving or (client.state == "ready" and not _busy(client)):
                break
            await asyncio.sleep(_LOOK_S)
        if name in self._leaving:  # it may have been taken back
            self._closing.add(name)
            await self._engines.dismiss(name)
            self._closing.discard(name)
            self._leaving.discard(name)


def _busy(client: EngineClient) -> int:
    stats = client.stats
    if stats is None:
        return 0
    sending = stats.transfers.sending if stats.transfers is not None else 0
    return stats.running + stats.waiting + sending
