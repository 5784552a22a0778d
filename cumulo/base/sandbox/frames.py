"""How a worker and its owner talk: length-prefixed frames over a pair of sockets.

Jobs go to the worker as Python's marshal format: it trusts its owner. Replies come back as JSON and raw bytes: the
owner does not trust a process that runs a stranger's program.
"""

import json
import marshal
import struct
import time
from socket import socket
from typing import Any

_LENGTH = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")
_MOST_REPLY_BYTES = 160 << 20

Reply = tuple[dict[str, Any], bytes]


def job_frame(job: Any) -> bytes:
    """ValueError for what is not made of plain Python values."""
    packed = marshal.dumps(job)
    return _LENGTH.pack(len(packed)) + packed


def reply_frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    packed = json.dumps(header).encode()
    return _LENGTH.pack(4 + len(packed) + len(payload)) + _LENGTH.pack(len(packed)) + packed + payload


def read_job(owner: socket) -> Any:
    """The next job; EOFError when the owner is gone."""
    (length,) = _LENGTH.unpack(_received(owner, 4))
    return marshal.loads(_received(owner, length))


def send_job(worker: socket, frame: bytes, deadline_s: float) -> None:
    """TimeoutError when the worker does not take it, OSError when it is gone."""
    worker.settimeout(max(0.001, deadline_s - time.monotonic()))
    worker.sendall(frame)


def is_quiet(worker: socket) -> bool:
    """Whether nothing has come unasked: one job, one reply."""
    worker.settimeout(0)
    try:
        worker.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def receive_reply(worker: socket, deadline_s: float) -> Reply:
    """TimeoutError when none comes, EOFError or OSError when it is gone, ValueError for what is no reply."""
    length, header_length = _LENGTHS.unpack(_received(worker, 8, deadline_s))
    if not 4 <= length <= _MOST_REPLY_BYTES or header_length > length - 4:
        raise ValueError(f"a reply of {length:,} bytes with a header of {header_length:,}")
    data = _received(worker, length - 4, deadline_s)
    header = json.loads(data[:header_length])
    if not isinstance(header, dict):
        raise ValueError("a reply without a header")
    return header, data[header_length:]


def _received(peer: socket, count: int, deadline_s: float | None = None) -> bytes:
    """What is there already is taken after the deadline, too: the owner may have had to wait for its turn."""
    parts: list[bytes] = []
    while count:
        if deadline_s is not None:
            peer.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = peer.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
