"""Mailboxes between the processes of one host: a semaphore for each message that has come, another for each that
has been read, and what the last few messages say. The shared-memory player owns them.

Semaphores of the C library order memory between processes on every processor, and a process that waits sleeps.
"""

import ctypes
import errno
import mmap
import os
import struct
import time
from collections import Counter
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from cumulo.collectives.decide.schedule import Transfer
from cumulo.collectives.play.waiting import CollectiveStanding, MessageHead, wait_in_store
from cumulo.errors import ConfigError

HEADER = struct.Struct("<IIQIQ")  # a MessageHead, the window's generation, where the bytes begin in it
SLOTS = 8  # messages that may be under way from one rank to another on a channel
_TAKEN_AT, _HEADERS_AT = 32, 64  # in a box; a semaphore has 32 bytes
_BOX = -(-(_HEADERS_AT + SLOTS * HEADER.size) // 32) * 32
_SPINS = 50
_LOOK_S = 0.2  # how often a waiting rank looks whether its peer still lives

_libc = ctypes.CDLL(None, use_errno=True)  # gives up Python's lock while it waits
_quick = ctypes.PyDLL(None)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Mailboxes:
    """Box (sender, channel) lies in the receiver's file."""

    def __init__(self, rank: int, nodes: int, channels: int, store: Store, timeout_s: float) -> None:
        self.rank, self.channels, self._timeout_s = rank, channels, timeout_s
        size = _BOX * nodes * channels
        self.path = shared_file("boxes", size)
        self._maps = [_map(self.path, size)]
        own = _address(self._maps[0])
        for box in range(nodes * channels):
            for at in (0, _TAKEN_AT):
                if _libc.sem_init(ctypes.c_void_p(own + box * _BOX + at), 1, 0):
                    raise ConfigError("this system has no semaphores between processes; use sockets")
        store.set(f"collective boxes {rank}", f"{os.getpid()} {self.path}")
        self._maps, self._pids = [], []
        for peer in range(nodes):
            pid, path = wait_in_store(store, f"collective boxes {peer}", peer, rank, timeout_s).split(" ", 1)
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
        """Until a message has been read."""
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
    handle = os.memfd_create(f"cumulo-collective-{what}")  # not /dev/shm, which is small in containers
    os.ftruncate(handle, max(1, size))
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
