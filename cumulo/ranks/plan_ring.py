"""PlanRing: one process writes messages that several ranks read, each in order and all of them. The engine's runner
sends its plans through it.

On one host a message is copied once, into memory that all map, and each reader is woken by a few bytes on its pipe
that say where it lies. The pipe orders memory between the processes, and its end tells a reader that the writer is
gone. Between hosts the same pipe is a TCP connection, and carries the messages themselves.
"""

import contextlib
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from cumulo.errors import RanksFailed
from cumulo.ranks.rank_meter import READ, WORDS, Words

RING_BYTES = 1 << 20
_PLACE = struct.Struct("<QIB")  # where a piece begins, its length, and whether more of its message follows
_LENGTH = struct.Struct("!i")
_ATOMIC = 512  # bytes: a write of no more than these to a pipe or socket that blocks is never cut
_POLL_S = 50e-6


class RingFile:
    """The memory: a table of what every rank has done (`rank_meter`), and the ring behind it."""

    def __init__(self, path: Path, world: int) -> None:
        with path.open("r+b") as file:
            # Its pages are here from the start: a plan must not wait for them.
            self.memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        table = 8 * WORDS * world
        self.progress: Words = np.frombuffer(self.memory, np.uint64, WORDS * world).reshape(world, WORDS)
        self.ring = memoryview(self.memory)[table:]

    @staticmethod
    def create(world: int, ring_bytes: int = RING_BYTES) -> Path:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        handle, name = tempfile.mkstemp(prefix="cumulo-plans-", dir=folder)
        os.ftruncate(handle, 8 * WORDS * world + ring_bytes)
        os.close(handle)
        return Path(name)


class PlanWriter:
    def __init__(self, file: RingFile | None, pipes: Mapping[int, Connection], timeout_s: float) -> None:
        """`pipes` by rank. Without a file, messages travel through the pipes."""
        self._file, self._pipes, self._timeout_s = file, dict(pipes), timeout_s
        self._readers = np.array(sorted(self._pipes), dtype=np.intp)
        self._written = self._read = 0  # bytes; read: by the slowest, when that was last looked at

    def send(self, message: bytes) -> None:
        """To all readers. RanksFailed, if one is gone or reads nothing for too long."""
        if self._file is None:
            self._tell(message)
            return
        size = len(self._file.ring)
        most = size // 4
        for first in range(0, len(message), most):
            piece = message[first : first + most]
            self._tell(self._place(piece, first + most < len(message), size))

    def _place(self, piece: bytes, more: bool, size: int) -> bytes:
        """Copy a piece into the ring, where it lies in one run."""
        assert self._file is not None
        start = self._written
        if start % size + len(piece) > size:
            start += size - start % size
        end = start + len(piece)
        if end - self._read > size:
            self._wait_for_room(end - size)
        at = start % size
        self._file.ring[at : at + len(piece)] = piece
        self._written = end
        return _PLACE.pack(start, len(piece), more)

    def _wait_for_room(self, read: int) -> None:
        assert self._file is not None
        deadline = time.monotonic() + self._timeout_s
        while (slowest_read := int(self._file.progress[self._readers, READ].min())) < read:
            if time.monotonic() > deadline:
                slowest = int(self._readers[self._file.progress[self._readers, READ].argmin()])
                raise RanksFailed(f"rank {slowest}: has read no plan for {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        self._read = slowest_read

    def _tell(self, words: bytes) -> None:
        # What Connection.send_bytes writes, made once for all of them.
        framed = _LENGTH.pack(len(words)) + words
        for rank, pipe in self._pipes.items():
            try:
                if len(framed) > _ATOMIC or os.write(pipe.fileno(), framed) != len(framed):
                    pipe.send_bytes(words)
            except OSError:
                raise RanksFailed(f"rank {rank}: is gone") from None


class PlanReader:
    def __init__(self, file: RingFile | None, rank: int, pipe: Connection) -> None:
        self._file, self._rank, self._pipe = file, rank, pipe
        self._read = 0

    def receive(self) -> bytes | memoryview | None:
        """The next message, to be read before the next call; None when the writer has ended."""
        with contextlib.suppress(EOFError, OSError):
            if self._file is None:
                return self._pipe.recv_bytes()
            piece, more = self._piece()
            if not more:
                return piece
            pieces = [bytes(piece)]
            while more:
                piece, more = self._piece()
                pieces.append(bytes(piece))
            return b"".join(pieces)
        return None

    def _piece(self) -> tuple[memoryview, bool]:
        assert self._file is not None
        words = self._pipe.recv_bytes()
        # Only now: what was read before lies on this side of the wait, whatever the processor reorders.
        self._file.progress[self._rank, READ] = self._read
        start, length, more = _PLACE.unpack(words)
        at = start % len(self._file.ring)
        self._read = start + length
        return self._file.ring[at : at + length], bool(more)
