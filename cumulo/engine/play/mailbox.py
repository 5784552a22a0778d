"""Mailbox: items from one thread to another, with a bell that a selector or poller can wait for."""

import contextlib
import select
import socket
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)

    def fileno(self) -> int:
        """Readable while something may be in it."""
        return self._bell.fileno()

    def put(self, item: T) -> None:
        self.put_all((item,))

    def put_all(self, items: Iterable[T]) -> None:
        self._items.extend(items)
        # A full pipe rings already; a closed one has nobody to ring for.
        with contextlib.suppress(BlockingIOError, OSError):
            self._button.send(b"!")

    def take_all(self) -> list[T]:
        """Everything in it, in order."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._bell.recv(4096)
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken

    def wait(self, timeout_s: float) -> bool:
        """Wait until something is in it; False: nothing came."""
        return bool(self._items) or bool(select.select([self._bell], [], [], timeout_s)[0])

    def close(self) -> None:
        self._bell.close()
        self._button.close()
