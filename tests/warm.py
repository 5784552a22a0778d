"""`cumulo ARGS...` as a process that need not import torch and the server's libraries first: it is forked from one
that did, once per session. A start then costs tenths of a CPU second instead of seven.

    process = warm.start(["serve", "--port", "0"], stdout=log, stderr=log)     # like subprocess.Popen

    done = warm.run_program(path)                                               # like `python PATH`

The process is the caller's own child, with its own arguments, environment and standard streams. The engine process
of a server is forked, too, the first time; a server that restarts its engine starts it as users' servers do, unless
SPARE_ENGINES in its environment says how many more are forked, which replace a lost one at once; SPARE_RANKS says
the same of the ranks of `cumulo train`. LOADED_LIBRARY is the path of a library that whoever asks for it by its
name finds there. Requests without a seed get the same ones in every run. Tests of the start itself, or of memory,
start a process of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.spares import (
    ENGINE,
    RANKS_START,
    Child,
    end_after,
    prepare_engines,
    prepare_forkserver,
    prepare_ranks,
    receive,
    renumber,
)

ROOT = Path(__file__).parents[1]
DRAWING = ("cumulo.serve.engine_link.engine_supervisor", "cumulo.gateway.app")  # modules that draw seeds
PRELOAD = (
    "cumulo.cli.app",
    "cumulo.cli.shared.help_words",
    "cumulo.serve.server",
    "cumulo.gateway.server",
    ENGINE,
    "cumulo.console.install",
    "cumulo.train.run.trainer",
    "cumulo.engine.llm",
    "openai",
    "torch._dynamo",  # which optimizers import
    RANKS_START,
)
RANKED = {"--plan", "--tp", "--pp", "--ep"}  # options with which an engine starts ranks
_PR_SET_CHILD_SUBREAPER = 36
_PROGRAM, _CODE, _MODULE = "python", "python -c", "python -m"
_starting = threading.Lock()


def start(
    arguments: Sequence[str],
    *,
    stdout: IO[Any],
    stderr: IO[Any],
    stdin: IO[Any] | None = None,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    more_fds: Sequence[int] = (),
) -> Child:
    """`cumulo ARGUMENTS...`; without `stdin` it has none. `more_fds` have the same numbers there."""
    order = {
        "arguments": list(arguments), "cwd": str(cwd), "more_fds": list(more_fds),
        "environment": dict(os.environ if env is None else env),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stdin = stdin or stack.enter_context(Path(os.devnull).open("rb"))
        stack.enter_context(_starting)
        parent = _parent()
        # The process that forks it ends at once, and we inherit it, but nobody else's orphans.
        _adopt_orphans(True)
        try:
            message = json.dumps(order).encode()
            fds = [*(stream.fileno() for stream in (stdin, stdout, stderr)), *more_fds]
            socket.send_fds(parent, [len(message).to_bytes(4, "big")], fds)
            parent.sendall(message)
            told = b""
            while not told.endswith(b"\n"):
                told += parent.recv(64) or _gone()
        finally:
            _adopt_orphans(False)
    return Child(int(told))


def run_program(path: Path, cwd: Path = ROOT, timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
    """`python PATH` with what it prints; a program that does not end is killed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = start([_PROGRAM, str(path)], stdout=out, stderr=err, cwd=cwd)
        try:
            code = child.wait(timeout_s)
        except BaseException:
            child.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([str(path)], code, out.read().decode(), err.read().decode())


def start_module(name: str, *arguments: str, stdout: IO[Any], stdin: IO[Any] | None = None) -> Child:
    """`python -m NAME ARGUMENTS...` with our standard error."""
    with os.fdopen(os.dup(2), "wb") as stderr:
        return start([_MODULE, name, *arguments], stdout=stdout, stderr=stderr, stdin=stdin)


def start_code(code: str, fds: Sequence[int]) -> int:
    """`python -c CODE` with these files open and with our standard streams; its process id."""
    with os.fdopen(os.dup(1), "wb") as out, os.fdopen(os.dup(2), "wb") as err:
        return start([_CODE, code], stdout=out, stderr=err, cwd=Path.cwd(), more_fds=fds).pid


def _gone() -> bytes:
    raise RuntimeError("the process that forks others is gone")


def _adopt_orphans(adopt: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


_lines: list[socket.socket] = []  # to the process that has everything imported, once there is one


def _parent() -> socket.socket:
    if not _lines:
        _start_parent()
    return _lines[0]


def _start_parent() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        # The last word is how tests find an engine among a server's children: it is forked from here.
        [sys.executable, "-m", "tests.warm", str(theirs.fileno()), "engine_process"],
        cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()
    _keep(ours, lambda: process.wait(300))


def fork_parent(not_its_own: socket.socket) -> None:
    """For a process that has everything imported itself: the one that forks others is its copy."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        not_its_own.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.close(nothing)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, closefd=False)  # noqa: SIM115
            for number, mode in enumerate("rww")
        )
        _serve(theirs)
        os._exit(0)
    theirs.close()
    _keep(ours, lambda: os.waitpid(child, 0))


def _keep(line: socket.socket, wait: Callable[[], object]) -> None:
    def end() -> None:
        line.close()
        wait()

    _lines.append(line)
    atexit.register(end)


# -- the other process ----------------------------------------------------------------------------------------
def _fork_when_told(line: socket.socket) -> dict[str, Any] | None:
    """Returns in each new process, with what it shall run; and None when nobody asks any more."""
    while (received := receive(line)) is not None:
        order, fds = received
        gate, hinge = os.pipe()
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            if child := os.fork():
                os.write(tell, f"{child}\n".encode())
                os._exit(0)
            os.close(hinge)
            os.read(gate, 1)  # opens when the process between has ended: then our parent is who asked
            for fd in (gate, told, tell):
                os.close(fd)
            line.close()
            renumber(fds, [0, 1, 2, *order["more_fds"]])
            return order
        os.waitpid(between, 0)
        line.sendall(os.read(told, 64))
        for fd in (gate, hinge, told, tell, *fds):
            os.close(fd)
    return None


def _become(order: dict[str, Any]) -> None:
    """Be `cumulo ARGUMENTS...`, or `python PATH`."""
    # A shell that starts the tests in the background has them, and so us, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    if library := os.environ.pop("LOADED_LIBRARY", None):
        ctypes.CDLL(library)
    if order["arguments"][0] == _PROGRAM:
        path = order["arguments"][1]
        sys.argv = [path]
        sys.path[0] = str(Path(path).parent)
        runpy.run_path(path, run_name="__main__")
        return
    if order["arguments"][0] == _MODULE:
        sys.argv = order["arguments"][1:]
        sys.modules.pop(sys.argv[0], None)  # which a test may have imported
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if order["arguments"][0] == _CODE:
        exec(order["arguments"][1], {"__name__": "__main__"})
        return
    sys.argv = ["cumulo", *order["arguments"]]
    from cumulo.cli import main
    from cumulo.cli.shared import terminal

    if width := os.environ.get("COLUMNS"):  # read when the consoles were made
        terminal.out._width = terminal.err._width = int(width)
    _draw_the_same_seeds()
    if order["arguments"][:1] == ["serve"]:
        if "--rank-of" in order["arguments"]:
            prepare_forkserver()
        ranked = not RANKED.isdisjoint(order["arguments"])
        prepare_engines(1 + int(os.environ.get("SPARE_ENGINES", 0)), ranked)
    if order["arguments"][:1] == ["train"]:
        prepare_ranks(int(os.environ.get("SPARE_RANKS", 0)))
    main()


def _draw_the_same_seeds() -> None:
    """Requests without a seed are drawn the same in every run of a test; an engine that is started again draws
    others than the one before."""
    draw = random.Random(0)
    for name in DRAWING:
        module: Any = sys.modules.get(name)
        if module is not None:
            module.secrets = SimpleNamespace(randbits=draw.getrandbits, token_hex=secrets.token_hex)


def _main() -> None:
    for name in PRELOAD:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(line: socket.socket) -> None:
    order = _fork_when_told(line)
    if order is not None:
        end_after(lambda: _become(order))


if __name__ == "__main__":
    _main()
