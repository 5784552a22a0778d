"""Keeper: which connections may stay. Owned by `_Run`; every Connection registers with it.

A connection is *waiting* while its client owes us something (the first byte, the rest of a header or body, the next
request) and *busy* while we owe it an answer. When there are too many, the longest waiting are closed, first those
that have never sent a whole request, and first of the address that has most; a busy one is never closed for room.
When all are busy, a few more are let in for health, readiness and metrics only.

Time-outs run on the keeper's own clock, which stands still while this process is held up: a client is not at fault
for what nobody could read.
"""

import asyncio
import ipaddress
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

from cumulo.serve.http.limits import HttpLimits

log = logging.getLogger(__name__)

_EVERY_S = 5.0


class Tally:
    def __init__(self, count: Callable[[str], None]) -> None:
        self.count = count  # gets every reason: the metrics' counter
        self._untold: dict[str, int] = {}  # events by reason since its last line
        self._told_s: dict[str, float] = {}

    def note(self, reason: str, message: str, *details: object) -> None:
        """`reason` is one of a few fixed words: a label of the metrics and of the log."""
        self.count(reason)
        now_s = time.monotonic()
        if now_s - self._told_s.get(reason, -_EVERY_S) >= _EVERY_S:
            self._told_s[reason] = now_s
            log.warning("%s: " + message, reason, *details)
        else:
            self._untold[reason] = self._untold.get(reason, 0) + 1

    def flush(self) -> None:
        """Tell what has not been told; called every second or so."""
        now_s = time.monotonic()
        for reason, times in list(self._untold.items()):
            if now_s - self._told_s[reason] >= _EVERY_S:
                self._told_s[reason] = now_s
                del self._untold[reason]
                log.warning("%s: %d more in the last %.0f s", reason, times, _EVERY_S)


class KeptConnection(Protocol):
    """What the Keeper needs to know of a connection, and what it asks of one."""

    address: str  # of its client, as the limit counts it
    reserved: bool  # in the reserve, for operators
    answered: bool  # has a request of it had its answer?

    @property
    def transport(self) -> asyncio.BaseTransport: ...
    def describe(self) -> str: ...
    def give_way(self) -> None: ...
    def check(self, now_s: float, step_s: float) -> None: ...
    def __hash__(self) -> int: ...


class Keeper:
    def __init__(self, limits: HttpLimits, tally: Tally) -> None:
        self.limits, self.tally = limits, tally
        self.clock_s = 0.0
        self.connections: set[KeptConnection] = set()
        self._leaving: set[KeptConnection] = set()  # closed for room, and not yet gone
        self._waiting: OrderedDict[KeptConnection, None] = (
            OrderedDict()
        )  # for their clients; the longest first
        self._ordinary = 0  # connections and sockets that are not in the reserve
        self._counts: Counter[str] = Counter()  # the same by address
        self._reserve: OrderedDict[KeptConnection, None] = OrderedDict()
        self._sockets: dict[asyncio.BaseTransport, str] = {}  # with their addresses
        self._task: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        return self._ordinary + len(self._reserve)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # -- coming and going ---------------------------------------------------------------------------------
    def admit(self, connection: KeptConnection, host: str) -> None:
        """Give a new connection its address and its place, which may be one in the reserve."""
        connection.address = _network(host)
        connection.reserved = not self._has_room(connection.address)
        if connection.reserved:
            if len(self._reserve) >= self.limits.reserve:
                self._close(next(iter(self._reserve)))
            self._reserve[connection] = None
        else:
            self._count(connection.address, 1)
        self.connections.add(connection)

    def promote(self, connection: KeptConnection) -> bool:
        """Move a connection out of the reserve if there is room by now; returns whether there is."""
        if not self._has_room(connection.address):
            return False
        self._reserve.pop(connection, None)
        connection.reserved = False
        self._count(connection.address, 1)
        return True

    def release(self, connection: KeptConnection) -> None:
        """It is gone, or no longer counted; may be said twice."""
        if connection not in self.connections:
            self._leaving.discard(connection)
            return
        self.connections.discard(connection)
        self.busy(connection)
        if connection.reserved:
            self._reserve.pop(connection, None)
        else:
            self._count(connection.address, -1)

    def _close(self, connection: KeptConnection) -> None:
        """Its place is free at once, its descriptor as soon as its last words are out, or soon in any case."""
        self.tally.note("evicted", "too many connections; closing %s", connection.describe())
        self.release(connection)
        self._leaving.add(connection)
        connection.give_way()

    def _count(self, address: str, more: int) -> None:
        self._ordinary += more
        self._counts[address] += more
        if not self._counts[address]:
            del self._counts[address]

    # -- waiting and busy ---------------------------------------------------------------------------------
    def waiting(self, connection: KeptConnection) -> None:
        """It is the client's turn, since now or longer."""
        if not connection.reserved:
            self._waiting.setdefault(connection)

    def busy(self, connection: KeptConnection) -> None:
        """It is our turn."""
        self._waiting.pop(connection, None)

    # -- sockets ------------------------------------------------------------------------------------------
    def take_socket(self, connection: KeptConnection) -> bool:
        """A connection becomes a WebSocket, which another protocol speaks; False: there are too many."""
        self._prune_sockets()
        if connection.reserved or len(self._sockets) >= self.limits.sockets:
            return False
        self.busy(connection)
        self.connections.discard(connection)
        self._sockets[connection.transport] = connection.address
        return True

    def _prune_sockets(self) -> None:
        for transport in [each for each in self._sockets if each.is_closing()]:
            self._count(self._sockets.pop(transport), -1)

    # -- room ---------------------------------------------------------------------------------------------
    def _has_room(self, address: str) -> bool:
        if self._counts[address] >= self.limits.per_address:
            unanswered = (one for one in self._waiting if one.address == address and not one.answered)
            own = next(unanswered, None) or next(
                (one for one in self._waiting if one.address == address), None
            )
            if own is None:
                return False
            self._close(own)
        if self._ordinary < self.limits.connections:
            return True
        self._prune_sockets()
        # A few at a time: choosing looks at all that wait, and under attack the next newcomer is not far.
        first = sorted(self._waiting, key=lambda one: (one.answered, -self._counts[one.address]))
        for connection in first[: max(1, self.limits.connections // 32)]:
            self._close(connection)
        return self._ordinary < self.limits.connections

    # -- time-outs ----------------------------------------------------------------------------------------
    async def _run(self) -> None:
        interval_s = self.limits.sweep_s
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while True:
            await asyncio.sleep(interval_s)
            now_s = loop.time()
            self.sweep(min(now_s - looked_s, 2 * interval_s))
            looked_s = now_s

    def sweep(self, step_s: float) -> None:
        self.clock_s += step_s
        for connection in [*self.connections, *self._leaving]:
            connection.check(self.clock_s, step_s)
        self._prune_sockets()
        self.tally.flush()


def _network(host: str) -> str:
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
