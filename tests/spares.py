"""Processes that wait for their job in a forked command (`tests.warm`): an engine of a server, a rank of a training
run, the forkserver of an engine's ranks. Whoever would start such a process gets the one that waits."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from types import SimpleNamespace
from typing import IO, Any

ENGINE = "cumulo.serve.engine_link.engine_process"
ENGINE_START = "cumulo.serve.engine_link.early_start"
RANKS_START = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
SPARE = "spare engine"  # the name in /proc of a process that waits for its job
_PR_SET_NAME = 15
_MORE_FDS = 8


class Child:
    """A child of this process that `subprocess` did not start; what tests and the server use of its Popen."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        with self._waiting:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        pause_s = 0.001
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, fds, _, _ = socket.recv_fds(line, 4, 3 + _MORE_FDS)
    if not head:
        return None
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        text += line.recv(length - len(text))
    return json.loads(text), fds


def renumber(fds: Sequence[int], wanted: Sequence[int]) -> None:
    """Files that came over a socket get the numbers that they had there."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(wanted) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(wanted, above, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def prepare_engines(count: int, ranked: bool) -> None:
    """Engine processes that wait for their job; the server's first starts of one get them. `ranked`: they will have
    ranks."""
    waiting: list[Child] = []
    for _ in range(count):
        waiting.append(_spare_engine(waiting, ranked))

    def engine(arguments: Sequence[str], **options: Any) -> Any:
        return waiting.pop() if waiting else subprocess.Popen(arguments, **options)

    module: Any = importlib.import_module(ENGINE_START)
    module.subprocess = SimpleNamespace(Popen=engine, PIPE=subprocess.PIPE)


def _be_called(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _spare_engine(others: Sequence[Child], ranked: bool) -> Child:
    def be_engine() -> None:
        if ranked:
            prepare_forkserver()
        _be_called("engine")
        importlib.import_module(ENGINE).main()

    return _spare(others, be_engine)


def prepare_forkserver() -> None:
    """A process that waits to be the forkserver of this one's ranks. A new one would import torch first, and the
    rest: two CPU seconds."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        if (received := receive(theirs)) is None:
            os._exit(0)
        order, fds = received
        renumber(fds, order["more_fds"])
        end_after(lambda: exec(order["code"], {"__name__": "__main__"}))
    theirs.close()
    spawn = util.spawnv_passfds

    def spawn_once(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        if ours.fileno() < 0 or "multiprocessing.forkserver" not in args[-1]:
            return spawn(path, args, passfds)
        message = json.dumps({"code": args[-1], "more_fds": list(passfds)}).encode()
        with ours:
            socket.send_fds(ours, [len(message).to_bytes(4, "big")], list(passfds))
            ours.sendall(message)
        return child

    util.spawnv_passfds = spawn_once


def prepare_ranks(count: int) -> None:
    """Ranks of a training run that wait for their order; torchrun's agent gets them, and then starts others."""
    waiting: list[Child] = []
    for _ in range(count):
        waiting.append(_spare(waiting, _be_rank))

    def rank(args: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        if not waiting or list(args[1:3]) != ["-m", "cumulo"]:
            return subprocess.Popen(args, env=env, **options)
        child = waiting.pop()
        assert child.stdin is not None
        with child.stdin as line:
            line.write(json.dumps({"arguments": list(args[3:]), "environment": dict(env)}).encode())
        return child

    module: Any = importlib.import_module(RANKS_START)
    module.Popen = rank


def _be_rank() -> None:
    order = json.loads(sys.stdin.buffer.read())
    os.environ.clear()
    os.environ.update(order["environment"])
    _be_called(f"rank {os.environ['RANK']}")
    sys.argv = ["cumulo", *order["arguments"]]
    from cumulo.cli import main

    main()


def _spare(others: Sequence[Child], be: Callable[[], None]) -> Child:
    """A process that waits for its job on its standard input."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.dup2(theirs, 0)
        os.close(theirs)
        for other in others:  # whose jobs are not ours to keep open
            if other.stdin is not None:
                os.close(other.stdin.fileno())
        os.setsid()
        _be_called(SPARE)
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if poll.poll()[0][1] & select.POLLIN:
            end_after(be)
        os._exit(0)
    os.close(theirs)
    return Child(child, os.fdopen(ours, "wb"))


def end_after(be: Callable[[], None]) -> None:
    """What Python does at its end, less taking apart all that is imported: half a CPU second for each process."""
    code: Any = 0
    try:
        be()
    except SystemExit as end:
        code = end.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it is closed
            stream.flush()
    os._exit((code or 0) & 0xFF)
