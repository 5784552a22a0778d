"""Jobs for the tests of killable workers: honest ones, and each kind that must be ended."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from cumulo.base.sandbox.frames import reply_frame


def make(setup: Any):
    kept: list[Any] = []

    def work(job: Any) -> tuple[dict[str, Any], bytes]:
        kind, value = job
        if kind == "echo":
            return {"value": value, "setup": setup}, b"raw \x00 bytes"
        if kind == "pids":
            return {"child": os.getpid(), "keeper": os.getppid()}, b""
        if kind == "spin":
            while True:
                pass
        if kind == "sleep":
            time.sleep(600)
        if kind == "memory":
            while True:
                kept.append(bytearray(1 << 20))
        if kind == "keep":
            kept.append(bytearray(value))
            return {"kept": sum(map(len, kept))}, b""
        if kind == "segfault":
            ctypes.string_at(0)
        if kind == "exit":
            os._exit(0)
        if kind == "talk":
            os.write(0, reply_frame({"done": {"value": 1}}) + reply_frame({"done": {"value": 0}}))
            time.sleep(600)
        if kind == "raise":
            raise RuntimeError("a bug")
        if kind == "write":
            Path(value).write_text("text")
        if kind == "environment":
            return {"names": sorted(os.environ)}, b""
        raise AssertionError(kind)

    return work


def broken(setup: Any):
    raise RuntimeError("cannot be set up")
