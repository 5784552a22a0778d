"""One process writes plans that several ranks read, each in order and all of them, through the pipes to them. The
pipe of a rank on another host is a TCP connection; its end tells a rank that the engine is gone.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from multiprocessing.connection import Connection

from cumulo.errors import RanksFailed
from cumulo.ranks.rank_meter import READ, Words


class PlanWriter:
    def __init__(self, pipes: Mapping[int, Connection], timeout_s: float) -> None:
        """`pipes` by rank: sockets."""
        self._pipes, self._timeout_s = dict(pipes), timeout_s
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for pipe in self._pipes.values():
            with socket.socket(fileno=os.dup(pipe.fileno())) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: bytes) -> None:
        """To all readers. RanksFailed, if one is gone or reads nothing for too long."""
        for rank, pipe in self._pipes.items():
            try:
                pipe.send_bytes(message)
            except BlockingIOError:
                raise RanksFailed(f"rank {rank}: has read no plan for {self._timeout_s:g} s") from None
            except OSError:
                raise RanksFailed(f"rank {rank}: is gone") from None


class PlanReader:
    def __init__(self, pipe: Connection, words: Words) -> None:
        """`words`: of this rank, in which it counts the plans that it has taken."""
        self._pipe, self._words = pipe, words

    def receive(self) -> bytes | None:
        """The next message; None when the writer has ended."""
        with contextlib.suppress(EOFError, OSError):
            message = self._pipe.recv_bytes()
            self._words[READ] += 1
            return message
        return None
