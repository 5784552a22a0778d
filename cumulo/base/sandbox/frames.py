"""How a worker and its owner talk: length-prefixed frames over two pipes.

Jobs go to the worker as Python's marshal format: it trusts its owner. Replies come back as JSON and raw bytes: the
owner does not trust a process that runs a stranger's program.
"""

import json
import marshal
import os
import select
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")
MAX_REPLY_BYTES = 160 << 20

Reply = tuple[dict[str, Any], bytes]


def job_frame(job: Any) -> bytes:
    """ValueError for what is not made of plain Python values."""
    packed = marshal.dumps(job)
    return _LENGTH.pack(len(packed)) + packed


def reply_frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    packed = json.dumps(header).encode()
    return _LENGTH.pack(4 + len(packed) + len(payload)) + _LENGTH.pack(len(packed)) + packed + payload


# -- in the worker: blocking ----------------------------------------------------------------------------------
def read_job(fd: int) -> Any:
    """The next job; EOFError when the owner is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(fd, 4))
    return marshal.loads(_read_exactly(fd, length))


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# -- in the owner: with a deadline; the descriptors do not block ------------------------------------------------
def send_frame(fd: int, frame: bytes, deadline_s: float) -> None:
    """TimeoutError when the worker does not take it, BrokenPipeError when it is gone."""
    view = memoryview(frame)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            _wait(fd, select.POLLOUT, deadline_s)


def receive_reply(fd: int, deadline_s: float) -> Reply:
    """TimeoutError when none comes, EOFError when the worker is gone, ValueError for what is no reply."""
    data = _receive_some(fd, deadline_s)
    while len(data) < 8:
        data += _receive_some(fd, deadline_s)
    length, header_length = _LENGTHS.unpack_from(data)
    if not 4 <= length <= MAX_REPLY_BYTES or header_length > length - 4:
        raise ValueError(f"a reply of {length:,} bytes with a header of {header_length:,}")
    if len(data) < length + 4:
        parts, missing = [data], length + 4 - len(data)
        while missing > 0:
            parts.append(_receive_some(fd, deadline_s))
            missing -= len(parts[-1])
        data = b"".join(parts)
    if len(data) != length + 4:
        raise ValueError("more than a reply")  # one job, one reply
    header = json.loads(data[8 : 8 + header_length])
    if not isinstance(header, dict):
        raise ValueError("a reply without a header")
    return header, data[8 + header_length :]


def _receive_some(fd: int, deadline_s: float) -> bytes:
    while True:
        _wait(fd, select.POLLIN, deadline_s)
        try:
            part = os.read(fd, 1 << 18)
        except BlockingIOError:
            continue
        if not part:
            raise EOFError
        return part


def _wait(fd: int, event: int, deadline_s: float) -> None:
    """What is there already is taken after the deadline, too: the owner may have had to wait for its turn."""
    left_s = max(0.0, deadline_s - time.monotonic())
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(left_s * 1000):
        raise TimeoutError
