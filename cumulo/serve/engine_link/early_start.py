"""An engine process that is started before anybody needs it: it imports torch while the server's own process
imports what it needs. Begun by `cumulo serve`, taken by EngineChild, which then tells it its job.
"""

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import cumulo

EngineProcess = tuple["subprocess.Popen[bytes]", socket.socket]  # the process, and our end of the line to it
_spare: EngineProcess | None = None


def start_process(environment: Mapping[str, str]) -> EngineProcess:
    """It waits for its job on standard input, and ends when that does."""
    # The child must find this very package, however this process found it.
    package_folder = str(Path(cumulo.__file__).parents[1])
    paths = [package_folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "cumulo.serve.engine_link.engine_process", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            # A session of its own: Ctrl-C in a terminal is for the server, which then drains the engine.
            start_new_session=True,
        )
    return process, ours


def begin() -> None:
    global _spare
    _spare = start_process({})
    atexit.register(_end_spare)


def take_process(environment: Mapping[str, str]) -> EngineProcess:
    """The process that was begun, if there is one and it has the right environment; else a new one."""
    global _spare
    if _spare is None or environment:
        return start_process(environment)
    taken, _spare = _spare, None
    return taken


def _end_spare() -> None:
    """The server could not start: nobody will tell it a job."""
    if _spare is not None:
        process, _ = _spare
        process.kill()
        process.wait()
