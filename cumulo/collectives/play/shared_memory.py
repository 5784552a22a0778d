"""Messages through shared memory: a rank copies what it sends into a window that its peers map, and a peer adds it
from there to its own. The ranks of one host use it.

A rank goes on to its next step before its sends were read; a window has two halves, used in turn, and a step waits
until what lay in its half has been read.
"""

import ctypes
import errno
import mmap
import os
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from cumulo.base.machine import memory_file
from cumulo.base.quantities import quantity
from cumulo.collectives.decide.schedule import Transfer
from cumulo.collectives.play.messages import CollectiveFailed, CollectiveStanding, MessageHead, Parts
from cumulo.errors import ConfigError

HEADER = struct.Struct("<IIQIQ")  # a MessageHead, the window's generation, where the bytes begin in it
SLOTS = 64  # messages that may be under way from one rank to another on a channel
_TAKEN_AT, _HEADERS_AT = 32, 64  # in a box; a semaphore has 32 bytes
_BOX = -(-(_HEADERS_AT + SLOTS * HEADER.size) // 32) * 32
_SPINS = 50
_MOST_CHANNELS = 4
_ALIGNED = 64  # bytes: where what is sent begins
Unread = tuple[CollectiveStanding, Transfer, int]  # a message, and its number
_LOOK_S = 0.2  # how often a waiting rank checks whether its peer still lives

_libc = ctypes.CDLL(None, use_errno=True)  # gives up Python's lock while it waits
_quick = ctypes.PyDLL(None)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Mailboxes:
    """Mailboxes between the processes of one host: a semaphore for each message that has come, another for each
    that has been read, and what the last few messages say. Box (sender, channel) lies in the receiver's file.

    Semaphores of the C library order memory between processes on every processor, and a process that waits sleeps.
    """

    def __init__(self, rank: int, nodes: int, channels: int, store: Store, timeout_s: float) -> None:
        self.rank, self.channels, self._timeout_s = rank, channels, timeout_s
        size = _BOX * nodes * channels
        self.path = shared_file("boxes", size)
        self._maps = [_map(self.path, size)]
        own = _address(self._maps[0])
        for box in range(nodes * channels):
            for at in (0, _TAKEN_AT):
                if _libc.sem_init(ctypes.c_void_p(own + box * _BOX + at), 1, 0):
                    raise ConfigError(
                        "this system has no semaphores between processes; take the transport torch"
                    )
        store.set(f"collective boxes {rank}", f"{os.getpid()} {self.path}")
        self._maps, self._pids = [], []
        for peer in range(nodes):
            pid, path = _wait_in_store(store, f"collective boxes {peer}", peer, rank, timeout_s).split(" ", 1)
            self._pids.append(int(pid))
            self._maps.append(_map(Path(path), size))
        self._bases = [_address(one) for one in self._maps]
        self._sent: Counter[tuple[int, int]] = Counter()  # to (peer, channel)
        self._taken: Counter[tuple[int, int]] = Counter()  # of these, those that were read
        self._read: Counter[tuple[int, int]] = Counter()  # from (peer, channel)

    def post(
        self, standing: CollectiveStanding, transfer: Transfer, head: MessageHead, generation: int, start: int
    ) -> int:
        """Tell a peer of a message, and where in which window it is. Its number."""
        key = (transfer.peer, standing.channel)
        number = self._sent[key]
        if number - self._taken[key] >= SLOTS:
            self.wait_taken(standing, transfer, number - SLOTS)
        at = _BOX * (self.rank * self.channels + standing.channel)
        slot = at + _HEADERS_AT + number % SLOTS * HEADER.size
        HEADER.pack_into(self._maps[transfer.peer], slot, *head, generation, start)
        self._sent[key] = number + 1
        _quick.sem_post(ctypes.c_void_p(self._bases[transfer.peer] + at))
        return number

    def receive(self, standing: CollectiveStanding, transfer: Transfer) -> tuple[MessageHead, int, int]:
        """Wait for the next message of a peer; what it says, its window's generation and where it begins."""
        at = _BOX * (transfer.peer * self.channels + standing.channel)
        self._wait(self._bases[self.rank] + at, standing, transfer)
        number = self._read[transfer.peer, standing.channel]
        self._read[transfer.peer, standing.channel] = number + 1
        slot = at + _HEADERS_AT + number % SLOTS * HEADER.size
        *head, generation, start = HEADER.unpack_from(self._maps[self.rank], slot)
        return MessageHead(*head), generation, start

    def acknowledge(self, peer: int, channel: int) -> None:
        at = _BOX * (peer * self.channels + channel) + _TAKEN_AT
        _quick.sem_post(ctypes.c_void_p(self._bases[self.rank] + at))

    def wait_taken(self, standing: CollectiveStanding, transfer: Transfer, number: int) -> None:
        """Waits until a message has been read."""
        key = (transfer.peer, standing.channel)
        at = _BOX * (self.rank * self.channels + standing.channel) + _TAKEN_AT
        while self._taken[key] <= number:
            self._wait(self._bases[transfer.peer] + at, standing, transfer)
            self._taken[key] += 1

    def _wait(self, semaphore: int, standing: CollectiveStanding, transfer: Transfer) -> None:
        address = ctypes.c_void_p(semaphore)
        for _ in range(_SPINS):
            if not _quick.sem_trywait(address):
                return
        deadline = time.monotonic() + self._timeout_s
        while True:
            until = time.time() + min(_LOOK_S, max(0.0, deadline - time.monotonic()))
            limit = _TimeSpec(int(until), int(until % 1 * 1e9))
            if not _libc.sem_timedwait(address, ctypes.byref(limit)):
                return
            if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
                raise standing.failed(transfer, os.strerror(ctypes.get_errno()))
            if time.monotonic() >= deadline:
                raise standing.late(transfer, self._timeout_s)
            if not _alive(self._pids[transfer.peer]) and _quick.sem_trywait(address):
                raise standing.gone(transfer)

    def close(self) -> None:
        forget_file(self.path)


def shared_file(what: str, size: int) -> Path:
    """New zeros in memory, under a name that other processes of this user can open. They end with this process and
    those that have mapped them, however it ends."""
    handle = memory_file(
        f"cumulo-collective-{what}", max(1, size)
    )  # not /dev/shm, which is small in containers
    return Path(f"/proc/{os.getpid()}/fd/{handle}")


def forget_file(path: Path) -> None:
    os.close(int(path.name))


def _map(path: Path, size: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _alive(pid: int) -> bool:
    """A process that has ended and that nobody has waited for yet is gone, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


@dataclass(slots=True)
class _Window:
    """What one channel of this rank sends from."""

    bytes: Tensor
    generation: int
    half: int = 0  # that the next step uses
    # Messages of each half that nobody may have read yet.
    unread: tuple[list[Unread], list[Unread]] = field(default_factory=lambda: ([], []))


class SharedMemoryExchange:
    def __init__(self, rank: int, nodes: int, store: Store, timeout_s: float = 60.0) -> None:
        """`nodes`: ranks, and switches where there are some; they meet in the store."""
        self.rank, self._store = rank, store
        self.boxes = Mailboxes(rank, nodes, _MOST_CHANNELS, store, timeout_s)
        self._own: dict[int, _Window] = {}  # by channel
        self._peers: dict[tuple[int, int, int], Tensor] = {}  # by peer, channel and generation
        self._files: list[Path] = []

    def exchange(self, number: int, standing: CollectiveStanding, sends: Parts, receives: Parts) -> Parts:
        if standing.channel >= self.boxes.channels:
            raise ConfigError(
                f"{standing.schedule.name} has {standing.schedule.channels} channels, and shared memory "
                f"{self.boxes.channels} at most"
            )
        self._send(number, standing, sends)
        return [(transfer, self._arrived(number, standing, transfer, views)) for transfer, views in receives]

    def used(self, standing: CollectiveStanding, receives: Parts) -> None:
        for transfer, _ in receives:
            self.boxes.acknowledge(transfer.peer, standing.channel)

    def _send(self, number: int, standing: CollectiveStanding, sends: Parts) -> None:
        # What goes to several peers is copied once.
        different = {transfer.chunks: views for transfer, views in sends}
        sizes = {chunks: sum(view.nbytes for view in views) for chunks, views in different.items()}
        window = self._room(standing, sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values()))
        unread, starts = window.unread[window.half], {}
        at = window.half * (len(window.bytes) // 2)
        window.half = 1 - window.half
        for chunks, views in different.items():
            starts[chunks], end = at, at
            for view in views:
                window.bytes[end : end + view.nbytes].copy_(view.view(torch.uint8))
                end += view.nbytes
            at += -(-sizes[chunks] // _ALIGNED) * _ALIGNED
        for transfer, _ in sends:
            chunks = transfer.chunks
            head = MessageHead(number, standing.schedule.fingerprint, sizes[chunks])
            posted = self.boxes.post(standing, transfer, head, window.generation, starts[chunks])
            unread.append((standing, transfer, posted))

    def _room(self, standing: CollectiveStanding, wanted: int) -> _Window:
        """A window whose next half nobody reads any more, and which has so many bytes in it."""
        channel = standing.channel
        window = self._own.get(channel)
        if window is not None:
            for one in window.unread[window.half]:
                self.boxes.wait_taken(*one)
            window.unread[window.half].clear()
            if 2 * wanted <= len(window.bytes):
                return window
        size, generation = 2 * (-(-wanted // 4096) * 4096), 0 if window is None else window.generation + 1
        try:
            path = shared_file("window", size)
            self._files.append(path)
            made = _Window(_mapped(path), generation)
        except OSError as error:
            raise CollectiveFailed(
                f"{standing.schedule.name}: rank {self.rank} got no {quantity(size, 'B')} of memory to share, in "
                f"step {standing.step + 1} ({error.strerror}): raise the memory limit, or take the transport torch"
            ) from error
        if window is not None:
            made.unread[1 - made.half].extend(window.unread[1 - window.half])
        self._store.set(f"collective window {self.rank} {channel} {generation}", str(path))
        self._own[channel] = made
        return made

    def _arrived(
        self, number: int, standing: CollectiveStanding, transfer: Transfer, views: list[Tensor]
    ) -> list[Tensor]:
        said, generation, start = self.boxes.receive(standing, transfer)
        size = sum(view.nbytes for view in views)
        want = MessageHead(number, standing.schedule.fingerprint, size)
        if said != want:
            raise standing.differs(transfer, said, want)
        if not size:
            return views
        key = (transfer.peer, standing.channel, generation)
        if key not in self._peers:
            name = " ".join(map(str, key))
            try:
                self._peers[key] = _mapped(Path(self._store.get(f"collective window {name}").decode()))
            except OSError:
                raise standing.gone(transfer) from None
        found = []
        for view in views:
            found.append(self._peers[key][start : start + view.nbytes].view(view.dtype))
            start += view.nbytes
        return found

    def close(self) -> None:
        self.boxes.close()
        for path in self._files:
            forget_file(path)
        self._files.clear()


def _mapped(path: Path) -> Tensor:
    with path.open("r+b") as file:
        # Its pages are here from the start: a collective must not wait for them.
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(memory, dtype=torch.uint8)


def _wait_in_store(store: Store, key: str, peer: int, rank: int, timeout_s: float) -> str:
    """What a peer says of itself, before the first step."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return store.get(key).decode()
    except DistStoreError:
        raise CollectiveFailed(
            f"rank {peer} did not meet rank {rank} within {timeout_s:g} s, before step 1 of their first "
            "collective: it is lost, late, or uses another transport"
        ) from None
