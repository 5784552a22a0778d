"""Messages over TCP: a connection for each pair of ranks and channel, made when it is first needed. Every message
says its collective, schedule and length, so that one that was cut or is out of order is named."""

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque

from torch import Tensor, uint8
from torch.distributed import Store  # type: ignore[attr-defined]

from cumulo.collectives.decide.schedule import CollectiveSchedule, Transfer
from cumulo.collectives.play.messages import (
    CollectiveFailed,
    CollectiveStanding,
    MessageHead,
    Parts,
    peers_of,
    wait_in_store,
)

# Of a card's time, that one message takes before the next one's turn. Each slice costs a core a wake-up, so that
# short ones would slow down what they are to measure.
_SLICE_S = 20e-3
_WHOLE_S = 1.0  # ... of a connection, which has no other message to let in: few are longer
_LEAST_BYTES = 4096


class LinkShaper:
    """A network slower than this host. What a rank sends over TCP leaves no faster than the network's rate; waiting
    sleeps, so that it costs no core. The rate is that of the rank's card, which carries all its connections, or of
    each connection, as where a window, a path or a queue pair bounds it. `cumulo bench overlap` uses it."""

    def __init__(self, bytes_per_s: float, each_connection: bool = False) -> None:
        self.bytes_per_s, self.each_connection = bytes_per_s, each_connection
        self._free_s: dict[int, float] = {}  # when all that was granted has been sent
        self._lock = threading.Lock()

    def grant(self, wanted: int, goes_on: bool, connection: int) -> tuple[int, float]:
        """(bytes, the `time.monotonic()` at which they have left). `goes_on`: the message has been waiting for the
        card all the time, so that a late wake-up is made up for."""
        slice_s = _WHOLE_S if self.each_connection else _SLICE_S
        count = min(wanted, max(_LEAST_BYTES, int(self.bytes_per_s * slice_s)))
        key = connection if self.each_connection else -1
        with self._lock:
            free_s = self._free_s.get(key, 0.0)
            begin = free_s if goes_on else max(free_s, time.monotonic())
            self._free_s[key] = begin + count / self.bytes_per_s
            return count, self._free_s[key]


_HEADER = struct.Struct("<IIQ")  # a MessageHead
_HELLO = struct.Struct("<II")  # rank, channel
_BUFFER = 4 << 20


class SocketExchange:
    def __init__(
        self,
        rank: int,
        store: Store,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
        shaper: LinkShaper | None = None,
    ) -> None:
        """Ranks find each other's addresses in the store. `shaper`: the card that all sends pass; None: as fast as
        the host can."""
        self.rank, self._store, self._timeout_s, self._shaper = rank, store, timeout_s, shaper
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._store.set(f"collective address {rank}", f"{host}:{self._listener.getsockname()[1]}")
        self._links: dict[tuple[int, int], socket.socket] = {}

    def prepare(self, schedule: CollectiveSchedule) -> None:
        """Connect to the peers of a schedule; the lower rank calls."""
        needed = peers_of(schedule, self.rank) - set(self._links)
        for peer, channel in sorted(needed):
            if peer > self.rank:
                self._links[peer, channel] = self._call(schedule, peer, channel)
        self._listener.settimeout(self._timeout_s)
        while missing := [link for link in needed if link not in self._links]:
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                raise CollectiveFailed(
                    f"{schedule.name}: rank {missing[0][0]} did not connect to rank {self.rank} within "
                    f"{self._timeout_s:g} s, before step 1"
                ) from None
            link.settimeout(self._timeout_s)
            peer, channel = _HELLO.unpack(link.recv(_HELLO.size, socket.MSG_WAITALL))
            self._links[peer, channel] = _tuned(link)

    def _call(self, schedule: CollectiveSchedule, peer: int, channel: int) -> socket.socket:
        address = wait_in_store(self._store, f"collective address {peer}", peer, self.rank, self._timeout_s)
        host, port = address.rsplit(":", 1)
        try:
            link = socket.create_connection((host, int(port)), self._timeout_s)
            link.sendall(_HELLO.pack(self.rank, channel))
        except OSError as error:
            raise CollectiveFailed(
                f"{schedule.name}: rank {self.rank} could not connect to rank {peer} at {address}, before step 1: "
                f"{error.strerror or error}"
            ) from error
        return _tuned(link)

    def exchange(self, number: int, standing: CollectiveStanding, sends: Parts, receives: Parts) -> None:
        flows: dict[int, _Flow] = {}
        for transfer, views in sends:
            flow = flows.get(transfer.peer) or flows.setdefault(transfer.peer, self._flow(standing, transfer))
            flow.add_send(number, transfer, views)
        for transfer, views in receives:
            flow = flows.get(transfer.peer) or flows.setdefault(transfer.peer, self._flow(standing, transfer))
            flow.add_receive(number, transfer, views)
        deadline = time.monotonic() + self._timeout_s
        while open_flows := [flow for flow in flows.values() if not flow.done]:
            moved = [flow.move() for flow in open_flows]
            if any(moved):
                deadline = time.monotonic() + self._timeout_s
                continue
            poll = select.poll()
            for flow in open_flows:
                poll.register(flow.link, flow.events)
            now = time.monotonic()
            granted = min(
                (flow.granted_s for flow in open_flows if flow.granted_s is not None), default=deadline
            )
            if not poll.poll(1e3 * max(0.0, min(deadline, granted) - now)) and time.monotonic() >= deadline:
                raise standing.late(open_flows[0].transfer, self._timeout_s)

    def _flow(self, standing: CollectiveStanding, transfer: Transfer) -> "_Flow":
        return _Flow(self._links[transfer.peer, standing.channel], standing, self._shaper)

    def close(self) -> None:
        for link in (*self._links.values(), self._listener):
            with contextlib.suppress(OSError):
                link.close()


class _Flow:
    """One connection during one step: what goes out and what comes in."""

    def __init__(self, link: socket.socket, standing: CollectiveStanding, shaper: LinkShaper | None) -> None:
        self.link, self._standing, self._shaper = link, standing, shaper
        self._grant: tuple[int, float] | None = None  # bytes that may leave, and from when on
        self._sending = False  # something has left in this step
        self._out: deque[tuple[Transfer, memoryview]] = deque()
        # Bytes that are to come; with a header, what it must say.
        self._in: deque[tuple[Transfer, memoryview, MessageHead | None]] = deque()
        self._got = 0  # of the first of them

    def add_send(self, number: int, transfer: Transfer, views: list[Tensor]) -> None:
        parts = [part for part in map(_bytes, views) if len(part)]
        header = _HEADER.pack(*self._head(number, parts))
        self._out.append((transfer, memoryview(header)))
        self._out.extend((transfer, part) for part in parts)

    def add_receive(self, number: int, transfer: Transfer, views: list[Tensor]) -> None:
        parts = [part for part in map(_bytes, views) if len(part)]
        self._in.append((transfer, memoryview(bytearray(_HEADER.size)), self._head(number, parts)))
        self._in.extend((transfer, part, None) for part in parts)

    def _head(self, number: int, parts: list[memoryview]) -> MessageHead:
        return MessageHead(number, self._standing.schedule.fingerprint, sum(map(len, parts)))

    @property
    def done(self) -> bool:
        return not self._out and not self._in

    @property
    def transfer(self) -> Transfer:
        """The one it waits for."""
        return self._in[0][0] if self._in else self._out[0][0]

    @property
    def granted_s(self) -> float | None:
        """When the card has time for the next send; None: it waits for no card."""
        return self._grant[1] if self._out and self._grant is not None else None

    @property
    def events(self) -> int:
        sends = self._out and (self._grant is None or self._grant[1] <= time.monotonic())
        return (select.POLLOUT if sends else 0) | (select.POLLIN if self._in else 0)

    def move(self) -> bool:
        """Whether something moved."""
        return self._send() | self._receive()

    def _send(self) -> bool:
        moved = False
        while self._out:
            transfer, rest = self._out[0]
            most = min(len(rest), self._allowed())
            if not most:
                break
            try:
                count = self.link.send(rest[:most])
            except BlockingIOError:
                break
            except OSError:
                raise self._standing.gone(transfer) from None
            moved = self._sending = True
            if self._grant is not None:
                left = self._grant[0] - count
                self._grant = (left, self._grant[1]) if left else None
            if count == len(rest):
                self._out.popleft()
            else:
                self._out[0] = (transfer, rest[count:])
        return moved

    def _allowed(self) -> int:
        """Bytes that may leave now, of all that waits."""
        if self._shaper is None:
            return len(self._out[0][1])
        if self._grant is None:
            waiting = sum(len(part) for _, part in self._out)
            self._grant = self._shaper.grant(waiting, self._sending, self.link.fileno())
        return self._grant[0] if self._grant[1] <= time.monotonic() else 0

    def _receive(self) -> bool:
        moved = False
        while self._in:
            transfer, whole, must_say = self._in[0]
            try:
                count = self.link.recv_into(whole[self._got :])
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                raise self._standing.cut(transfer, self._got, len(whole), must_say is not None)
            moved = True
            self._got += count
            if self._got == len(whole):
                self._in.popleft()
                self._got = 0
                if must_say is not None:
                    said = MessageHead(*_HEADER.unpack(whole))
                    if said != must_say:
                        raise self._standing.differs(transfer, said, must_say)
        return moved


def _tuned(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        link.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    link.setblocking(False)
    return link


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(uint8).numpy().data
