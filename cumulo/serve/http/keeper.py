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
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from cumulo.serve.http.limits import HttpLimits

log = logging.getLogger(__name__)

_EVERY_S = 5.0


class Tally:
    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count  # gets every reason: the metrics' counter
        self._untold: dict[str, int] = {}  # events by reason since its last line
        self._told_s: dict[str, float] = {}

    def note(self, reason: str, message: str, *details: object) -> None:
        """`reason` is one of a few fixed words: a label of the metrics and of the log."""
        self._count(reason)
        now_s = time.monotonic()
        if now_s - self._told_s.get(reason, -_EVERY_S) >= _EVERY_S:
            self._told_s[reason] = now_s
            log.warning("%s: " + message, reason, *details)
        else:
            self._untold[reason] = self._untold.get(reason, 0) + 1

    def count(self, reason: str) -> None:
        """For what is ordinary: in the metrics, not in the log."""
        self._count(reason)

    def flush(self) -> None:
        """Tell what has not been told; called every second or so."""
        now_s = time.monotonic()
        for reason, times in list(self._untold.items()):
            if now_s - self._told_s[reason] >= _EVERY_S:
                self._told_s[reason] = now_s
                del self._untold[reason]
                log.warning("%s: %d more in the last %.0f s", reason, times, _EVERY_S)


class Address:
    """One client address and its connections. An IPv6 client counts by its 64-bit network, one site's."""

    __slots__ = ("answered", "count", "name", "unanswered")

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        # Longest waiting first: without a request yet that was answered, and after one.
        self.unanswered: OrderedDict[KeptConnection, None] = OrderedDict()
        self.answered: OrderedDict[KeptConnection, None] = OrderedDict()


class KeptConnection(Protocol):
    """What the Keeper needs to know of a connection, and what it asks of one."""

    address: Address
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
        self._addresses: dict[str, Address] = {}
        self._ordinary = 0  # connections and sockets that are not in the reserve
        self._reserve: OrderedDict[KeptConnection, None] = OrderedDict()
        self._sockets: dict[asyncio.BaseTransport, Address] = {}
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
        name = _network(host)
        address = self._addresses.get(name)
        if address is None:
            address = self._addresses[name] = Address(name)
        if self._has_room(address):
            self._take_in(connection, address)
        else:
            if len(self._reserve) >= self.limits.room.reserve:
                self._close(next(iter(self._reserve)))
            self._reserve[connection] = None
            connection.reserved, connection.address = True, address
        self.connections.add(connection)

    def _take_in(self, connection: KeptConnection, address: Address) -> None:
        self._addresses[address.name] = address  # it may have been forgotten when room was made
        self._ordinary += 1
        address.count += 1
        connection.reserved, connection.address = False, address

    def promote(self, connection: KeptConnection) -> bool:
        """Move a connection out of the reserve if there is room by now; returns whether there is."""
        address = self._addresses.get(connection.address.name, connection.address)
        if not self._has_room(address):
            return False
        self._reserve.pop(connection, None)
        self._take_in(connection, address)
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
            self._forget_if_empty(connection.address)
        else:
            self._leave(connection.address)

    def _close(self, connection: KeptConnection) -> None:
        """Its place is free at once, its descriptor as soon as its last words are out, or soon in any case."""
        self.tally.note("evicted", "too many connections; closing %s", connection.describe())
        self.release(connection)
        self._leaving.add(connection)
        connection.give_way()

    def _leave(self, address: Address) -> None:
        self._ordinary -= 1
        address.count -= 1
        self._forget_if_empty(address)

    def _forget_if_empty(self, address: Address) -> None:
        if not address.count and self._addresses.get(address.name) is address:
            del self._addresses[address.name]

    # -- waiting and busy ---------------------------------------------------------------------------------
    def waiting(self, connection: KeptConnection) -> None:
        """It is the client's turn, since now or longer."""
        if connection.reserved:
            return
        address = connection.address
        line = address.answered if connection.answered else address.unanswered
        line.setdefault(connection)

    def busy(self, connection: KeptConnection) -> None:
        """It is our turn."""
        address = connection.address
        if connection.answered:
            address.answered.pop(connection, None)
        else:
            address.unanswered.pop(connection, None)

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
            self._leave(self._sockets.pop(transport))

    # -- room ---------------------------------------------------------------------------------------------
    def _has_room(self, address: Address) -> bool:
        if address.count >= self.limits.per_address and not self._make_room([address], 1):
            return False
        if self._ordinary < self.limits.room.connections:
            return True
        self._prune_sockets()
        # A few at a time: choosing looks at all addresses, and under attack the next newcomer is not far.
        largest_first = sorted(self._addresses.values(), key=lambda each: -each.count)
        self._make_room(largest_first, max(1, self.limits.room.connections // 32))
        return self._ordinary < self.limits.room.connections

    def _make_room(self, addresses: list[Address], wanted: int) -> int:
        closed = 0
        for lines in ([each.unanswered for each in addresses], [each.answered for each in addresses]):
            for line in lines:
                while line and closed < wanted:
                    self._close(next(iter(line)))
                    closed += 1
        return closed

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
