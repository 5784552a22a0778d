"""The log of server and engine process: standard error that never blocks its writers and never fails.

A log is worth less than an answer. A thread writes; where standard error is a pipe that nobody reads, a full disk
or closed, lines are lost and counted; the process goes on, and says how many were lost as soon as it can write
again.
"""

import atexit
import io
import logging
import os
import re
import sys
import threading
from typing import Any

_MOST_BUFFERED_BYTES = 256 << 10
_TOLD = re.compile(rb"\((\d+) lines of this log were lost\)\n")
_DRAIN_S = 1.0  # when the process ends: for the last lines


class BufferedStderr(io.TextIOBase):
    """Stands in for `sys.stderr`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unsent = bytearray()
        self.lost_lines = 0
        self._untold_lines = 0  # lost, and not yet said to be
        self._begin_writing()
        os.register_at_fork(after_in_child=self._begin_writing)

    def _begin_writing(self) -> None:
        self._changed = threading.Condition()
        self._writing = False
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if len(self._unsent) + len(data) > _MOST_BUFFERED_BYTES:
                self._lose(data)
            else:
                if self._untold_lines:
                    self._unsent += b"(%d lines of this log were lost)\n" % self._untold_lines
                    self._untold_lines = 0
                self._unsent += data
                self._changed.notify_all()
        return len(text)

    def _lose(self, data: bytes) -> None:
        told = [int(lines) for lines in _TOLD.findall(data)]  # what they tell is still to be told
        lines = (data.count(b"\n") or 1) - len(told)
        self.lost_lines += lines
        self._untold_lines += lines + sum(told)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._unsent)
                data, self._unsent, self._writing = bytes(self._unsent), bytearray(), True
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # a full disk, or no such descriptor
                with self._changed:
                    self._lose(data)

    def drain(self) -> None:
        """Wait until everything is written, within a bound."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent and not self._writing, _DRAIN_S)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def install() -> BufferedStderr:
    """Put it in place of `sys.stderr`, once per process."""
    if isinstance(sys.stderr, BufferedStderr):
        return sys.stderr
    _fill_standard_descriptors()
    buffered = sys.stderr = BufferedStderr(2)
    logging.raiseExceptions = False  # what goes wrong with a log line is no reason to write more of them
    atexit.register(buffered.drain)
    return buffered


# Control characters, and those that end a line or turn its direction.
_UNSAFE = (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _UNSAFE}


class SafeFormatter(logging.Formatter):
    """Writes what callers have sent so that it looks like nothing else: a message is one line, and the lines of a
    traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_ESCAPES)

    def formatException(self, error: Any) -> str:
        return "\n".join(
            "    " + line.translate(_ESCAPES) for line in super().formatException(error).split("\n")
        )


def start_logging(level: str, who: str) -> None:
    """Set up logging, in the same way for gateway, server and engine process."""
    install()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter(f"%(asctime)s {who} %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


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
