"""SteadyStderr: standard error that never blocks and never fails. Installed by server and engine process.

A log is worth less than an answer. Where standard error is a pipe that nobody reads, a full disk or closed, lines
are lost and counted; the process goes on, and says how many were lost as soon as it can write again.
"""

import atexit
import contextlib
import io
import logging
import os
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable

_MOST_BUFFERED_BYTES = 256 << 10
# What a pipe takes whole or not at all, and at least has room for when it polls as writable.
_PIECE_BYTES = 4096

Write = Callable[[bytes], int]  # how many bytes were taken; raises OSError


class SteadyStderr(io.TextIOBase):
    """Stands in for `sys.stderr`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._write, self._is_terminal = _writer(descriptor), os.isatty(descriptor)
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self.lost_lines = 0
        self._untold_lines = 0  # lost, and not yet said to be
        self._being_told_lines = 0  # said to be lost by a line that is not sent yet

    def write(self, text: str) -> int:
        line = text.encode("utf-8", "backslashreplace")
        with self._lock:
            if len(self._unsent) + len(line) > _MOST_BUFFERED_BYTES:
                self._send()
            if len(self._unsent) + len(line) > _MOST_BUFFERED_BYTES:
                self._lose(line.count(b"\n") or 1)
            else:
                if (
                    self._untold_lines
                    and not self._being_told_lines
                    and len(self._unsent) < _MOST_BUFFERED_BYTES // 2
                ):
                    self._unsent += b"(%d lines of this log were lost)\n" % self._untold_lines
                    self._being_told_lines, self._untold_lines = self._untold_lines, 0
                self._unsent += line
                self._send()
        return len(text)

    def _send(self) -> None:
        while self._unsent:
            try:
                sent_bytes = self._write(bytes(self._unsent[:_PIECE_BYTES]))
            except BlockingIOError:
                return
            except (OSError, ValueError):  # a full disk, or no such descriptor
                self._untold_lines += self._being_told_lines
                self._lose((self._unsent.count(b"\n") or 1) - (self._being_told_lines > 0))
                self._being_told_lines = 0
                self._unsent.clear()
                return
            del self._unsent[:sent_bytes]
            if not sent_bytes:
                return
        self._being_told_lines = 0

    def _lose(self, lines: int) -> None:
        self.lost_lines += lines
        self._untold_lines += lines

    def flush(self) -> None:
        with self._lock:
            self._send()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._descriptor

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def install() -> SteadyStderr:
    """Put it in place of `sys.stderr`, once per process."""
    present = sys.stderr
    if isinstance(present, SteadyStderr):
        return present
    _fill_standard_descriptors()
    if present is not None:
        with contextlib.suppress(OSError, ValueError):
            present.flush()
    steady = SteadyStderr(2)
    sys.stderr = steady
    logging.raiseExceptions = False  # what goes wrong with a log line is no reason to write more of them
    atexit.register(steady.flush)
    return steady


def start_logging(level: str, who: str) -> None:
    """The one set-up of logging, of both processes."""
    install()
    # No line says where in the code it was written, nor by which thread: finding that out for every request costs
    # more than writing it.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(
        level=level.upper(), handlers=[_handler(f"%(asctime)s {who} %(levelname)s %(message)s")]
    )


def _handler(form: str) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormat(form))
    return handler


class _LineFormat(logging.Formatter):
    """Writes the date once a second."""

    _second, _date = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._date = second, super().formatTime(record, datefmt).partition(",")[0]
        return f"{self._date},{int(record.msecs):03d}"


def _fill_standard_descriptors() -> None:
    """A closed standard descriptor would be given to the next file or socket, which would then get our messages."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)


def _writer(descriptor: int) -> Write:
    """How to write there without waiting. The descriptor's own flags are shared with other processes, and stay."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return lambda data: os.write(descriptor, data)
    if stat.S_ISSOCK(mode):
        connection = socket.socket(fileno=os.dup(descriptor))
        return lambda data: connection.send(data, socket.MSG_DONTWAIT)
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:  # another user's, or no /proc
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)

        def write_if_room(data: bytes) -> int:
            if not any(event & select.POLLOUT for _, event in poll.poll(0)):
                raise BlockingIOError
            return os.write(descriptor, data)

        return write_if_room
    return lambda data: os.write(own, data)
