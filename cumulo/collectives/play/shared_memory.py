"""Schedules over shared memory, without copies between processes: a rank writes what it sends into a window that
its peers map, and a peer adds it from there to its own. The ranks of one host use it.

    player = SharedMemoryPlayer(rank, ranks, store, timeout_s=60)
    player.run(schedule, tensor)

A chunk has two places: its home in the caller's tensor, and one in the window. A sum is written into the window
when its home is read, and back, so that it is not copied before it is sent on. A rank goes on to its next step
before its sends were read; it waits when it is about to write over them.
"""

import ctypes
import errno
import mmap
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from cumulo.base.quantities import quantity
from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, Move, Transfer
from cumulo.collectives.play.messages import CollectiveFailed, CollectiveStanding, MessageHead, wait_in_store
from cumulo.collectives.play.tensor_chunks import TensorChunks, add
from cumulo.errors import ConfigError

HEADER = struct.Struct("<IIQIQ")  # a MessageHead, the window's generation, where the bytes begin in it
SLOTS = 8  # messages that may be under way from one rank to another on a channel
_TAKEN_AT, _HEADERS_AT = 32, 64  # in a box; a semaphore has 32 bytes
_BOX = -(-(_HEADERS_AT + SLOTS * HEADER.size) // 32) * 32
_SPINS = 50
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


class SharedMemoryPlayer:
    def __init__(
        self, rank: int, nodes: int, store: Store, timeout_s: float = 60.0, channels: int = 4
    ) -> None:
        """`nodes`: ranks, and switches where there are some; they meet in the store. `channels`: at most."""
        self.rank, self._store = rank, store
        self.boxes = Mailboxes(rank, nodes, channels, store, timeout_s)
        self.number = self.generation = 0
        self.window = torch.empty(0, dtype=torch.uint8)
        self._windows: dict[tuple[int, int], Tensor] = {}  # of peers, by generation
        self._files: list[Path] = []
        self._unread: list[tuple[CollectiveStanding, Transfer, int]] = []  # of the last collective

    def run(self, schedule: CollectiveSchedule, tensor: Tensor, received: Tensor | None = None) -> None:
        """Plays a schedule in place; see `tensor_chunks`. All ranks call it with the same schedule."""
        if schedule.channels > self.boxes.channels:
            raise ConfigError(
                f"{schedule.name} has {schedule.channels} channels, and this player {self.boxes.channels} at most"
            )
        for standing, transfer, number in self._unread:
            self.boxes.wait_taken(standing, transfer, number)
        chunks = TensorChunks(schedule, self.rank, tensor, received)
        self.number += 1
        starts = self._grow(schedule, chunks.whole.element_size())
        lanes = [
            _Lane(self, schedule, chunks, channel, starts[channel]) for channel in range(schedule.channels)
        ]
        if len(lanes) == 1:
            lanes[0].play()
        else:
            with ThreadPoolExecutor(len(lanes)) as threads:
                for done in [threads.submit(lane.play) for lane in lanes]:
                    done.result()
        self._unread = [one for lane in lanes for some in lane.unread.values() for one in some]

    def _grow(self, schedule: CollectiveSchedule, element_size: int) -> list[int]:
        """Room for all that this rank sends. Where each channel's begins, if it is not the chunk's own place."""
        starts = [0] * schedule.channels
        if schedule.collective == "all_to_all":
            size = 0
            for channel in range(schedule.channels):
                starts[channel] = size
                for step in schedule.steps(self.rank, channel):
                    size += sum(schedule.elements(one) for one in step if one.move is Move.SEND)
        else:
            size = schedule.offsets[-1]
        if size * element_size > self.window.numel():
            self.generation += 1
            wanted = -(-size * element_size // 4096) * 4096
            try:
                path = shared_file("window", wanted)
                self._files.append(path)
                self.window = _mapped(path)
            except OSError as error:
                raise CollectiveFailed(
                    f"{schedule.name}: rank {self.rank} got no {quantity(wanted, 'B')} of memory to share, before "
                    f"step 1 ({error.strerror}): raise the memory limit, or take the transport tcp"
                ) from error
            self._store.set(f"collective window {self.rank} {self.generation}", str(path))
        return starts

    def window_of(self, peer: int, generation: int) -> Tensor:
        known = self._windows.get((peer, generation))
        if known is None:
            path = self._store.get(f"collective window {peer} {generation}").decode()
            known = self._windows[peer, generation] = _mapped(Path(path))
        return known

    def close(self) -> None:
        self.boxes.close()
        for path in self._files:
            forget_file(path)
        self._files.clear()


class _At(Enum):
    """Where a chunk's value is."""

    HOME = 0
    WINDOW = 1
    BOTH = 2


class _Lane:
    """One channel of one collective on this rank."""

    def __init__(
        self,
        player: SharedMemoryPlayer,
        schedule: CollectiveSchedule,
        chunks: TensorChunks,
        channel: int,
        start: int,
    ) -> None:
        self._player, self._schedule, self._chunks, self._channel = player, schedule, chunks, channel
        self._size = chunks.whole.element_size()
        self._in_place = schedule.collective != "all_to_all"
        self._next = start  # in the window, where chunks have no place of their own
        count = player.window.numel() // self._size * self._size
        self._window = player.window[:count].view(chunks.dtype)
        self._at: dict[int, _At] = {}  # else at home
        self.unread: dict[int, list[tuple[CollectiveStanding, Transfer, int]]] = {}  # sends of a chunk

    def play(self) -> None:
        schedule, rank = self._schedule, self._player.rank
        for index, step in enumerate(schedule.steps(rank, self._channel)):
            self._step(CollectiveStanding(schedule, rank, self._channel, index), step)
        for chunk, at in self._at.items():
            if at is _At.WINDOW:
                self._home(chunk).copy_(self._place(chunk))

    def _step(self, standing: CollectiveStanding, step: CollectiveStep) -> None:
        for transfer in step:
            if transfer.move is Move.SEND:
                self._send(standing, transfer)
        sums: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for transfer in step:
            if transfer.move is Move.REDUCE:
                part = self._arrived(standing, transfer)
                sums.setdefault((transfer.chunk, transfer.count), []).append((transfer.peer, part))
            elif transfer.move is Move.COPY:
                self._take(transfer, self._arrived(standing, transfer))
        for (chunk, count), parts in sums.items():
            self._add(chunk, count, parts)
            for peer, _ in parts:
                self._player.boxes.acknowledge(peer, self._channel)

    def _send(self, standing: CollectiveStanding, transfer: Transfer) -> None:
        player, start = self._player, self._next
        if self._in_place:
            start = self._schedule.offsets[transfer.chunk]
            for chunk, count, at in self._runs(transfer.chunk, transfer.count):
                if at is _At.HOME:
                    self._wait_read(chunk, count)
                    self._place(chunk, count).copy_(self._home(chunk, count))
                    self._set(chunk, count, _At.BOTH)
        else:
            for view in self._chunks.views(transfer):
                self._window[self._next : self._next + view.numel()].copy_(view)
                self._next += view.numel()
        elements = self._schedule.elements(transfer)
        head = MessageHead(player.number, self._schedule.fingerprint, elements * self._size)
        number = player.boxes.post(standing, transfer, head, player.generation, start * self._size)
        for chunk in transfer.chunks:
            self.unread.setdefault(chunk, []).append((standing, transfer, number))

    def _arrived(self, standing: CollectiveStanding, transfer: Transfer) -> Tensor:
        said, generation, start = self._player.boxes.receive(standing, transfer)
        size = self._schedule.elements(transfer) * self._size
        want = MessageHead(self._player.number, self._schedule.fingerprint, size)
        if said != want:
            raise standing.differs(transfer, said, want)
        if not size:
            return self._window[:0]
        try:
            window = self._player.window_of(transfer.peer, generation)
        except OSError:
            raise standing.gone(transfer) from None
        return window[start : start + size].view(self._chunks.dtype)

    def _take(self, transfer: Transfer, part: Tensor) -> None:
        for home in self._chunks.views(transfer):
            home.copy_(part[: home.numel()])
            part = part[home.numel() :]
        self._player.boxes.acknowledge(transfer.peer, self._channel)
        if self._in_place:
            self._set(transfer.chunk, transfer.count, _At.HOME)
        self._chunks.empty.difference_update(transfer.chunks)

    def _add(self, chunk: int, count: int, parts: list[tuple[int, Tensor]]) -> None:
        """Adds parts in the order of ranks, into the place that nobody reads."""
        offsets, first = self._schedule.offsets, self._schedule.offsets[chunk]
        for start, length, at in self._runs(chunk, count):
            home, place = self._home(start, length), self._place(start, length)
            own = place if at is _At.WINDOW else home
            to_home = at is _At.WINDOW or any(self.unread.get(one) for one in range(start, start + length))
            target = home if to_home else place
            low, high = offsets[start] - first, offsets[start + length] - first
            values = [(peer, part[low:high]) for peer, part in parts]
            if start in self._chunks.empty:
                self._chunks.empty.difference_update(range(start, start + length))
            else:
                values.append((self._player.rank, own))
            _fold([value for _, value in sorted(values, key=lambda one: one[0])], own, target)
            self._set(start, length, _At.HOME if to_home else _At.WINDOW)

    def _runs(self, chunk: int, count: int) -> Iterator[tuple[int, int, _At]]:
        """Chunks that follow each other and whose values are at the same kind of place."""
        if count == 1:
            yield chunk, 1, self._at.get(chunk, _At.HOME)
            return

        def kind(one: int) -> tuple[_At, bool, bool]:
            return self._at.get(one, _At.HOME), bool(self.unread.get(one)), one in self._chunks.empty

        for key, run in groupby(range(chunk, chunk + count), kind):
            some = list(run)
            yield some[0], len(some), key[0]

    def _wait_read(self, chunk: int, count: int) -> None:
        for one in range(chunk, chunk + count):
            for standing, transfer, number in self.unread.pop(one, ()):
                self._player.boxes.wait_taken(standing, transfer, number)

    def _set(self, chunk: int, count: int, at: _At) -> None:
        for one in range(chunk, chunk + count):
            self._at[one] = at

    def _home(self, chunk: int, count: int = 1) -> Tensor:
        offsets = self._schedule.offsets
        return self._chunks.whole[offsets[chunk] : offsets[chunk + count]]

    def _place(self, chunk: int, count: int = 1) -> Tensor:
        offsets = self._schedule.offsets
        return self._window[offsets[chunk] : offsets[chunk + count]]


def _fold(values: list[Tensor], own: Tensor, target: Tensor) -> None:
    if len(values) == 1:
        target.copy_(values[0])
    elif len(values) == 2:
        add(values[0], values[1], target)
    else:
        total = torch.empty_like(target) if target is own else target
        add(values[0], values[1], total)
        for value in values[2:]:
            add(total, value, total)
        if total is not target:
            target.copy_(total)


def _mapped(path: Path) -> Tensor:
    with path.open("r+b") as file:
        # Its pages are here from the start: a collective must not wait for them.
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(memory, dtype=torch.uint8)
