"""Beside a test worker: how long neither it nor any process below it could compute, for `--cpu-times`.

    python waits.py FD PID     # the open file's first 8 bytes: the seconds, as a double, until PID ends

A thread that waits for a core counts as computing, so that the seconds are the same on a busy machine.
"""

import mmap
import os
import struct
import sys
import time

PAUSE_S = 0.05


def computes(pid: int, but: int) -> bool:
    """Whether a thread of the process or of its descendants runs, waits for a core, or for a disk."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:  # it ended meanwhile
        return False
    for task in tasks:
        try:
            if _read(f"/proc/{pid}/task/{task}/stat").rpartition(b") ")[2][:1] in b"RD":
                return True
            children = _read(f"/proc/{pid}/task/{task}/children").split()
        except OSError:
            continue
        if any(child != but and computes(child, but) for child in map(int, children)):
            return True
    return False


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 65536)
    finally:
        os.close(file)


def main(file: int, worker: int) -> None:
    shared = mmap.mmap(file, 8)
    waited_s, before_s = 0.0, time.monotonic()
    while os.getppid() == worker:
        time.sleep(PAUSE_S)
        now_s = time.monotonic()
        if not computes(worker, os.getpid()):
            waited_s += now_s - before_s
            shared[:8] = struct.pack("d", waited_s)
        before_s = now_s


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
