"""A `cumulo serve` of a benchmark's own: started on a free port, watched, ended by its id."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from cumulo.errors import CumuloError

_START_S = 900.0


class ServerProcess:
    """The process of `cumulo WORDS` and, below it, the engine's. Leaving the `with` stops both."""

    def __init__(self, *words: str) -> None:
        # A file, not a pipe: nobody reads while the server writes.
        self._log = tempfile.NamedTemporaryFile(prefix="cumulo-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "cumulo.cli", *words, "--port", "0"]
        environment = os.environ | {"COLUMNS": "200"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        self.pid, self.url = self._process.pid, ""

    def __enter__(self) -> Self:
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine_pid(self) -> int | None:
        below = [
            int(pid)
            for file in Path(f"/proc/{self.pid}/task").glob("*/children")
            for pid in file.read_text().split()
        ]
        return next((pid for pid in below if b"engine_process" in _proc(pid, "cmdline")), None)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise CumuloError(f"the server ended before it was ready:\n{self._log_tail()}")
            if found := re.search(r"is ready at (http://\S+)/v1", self._log_tail()):
                self.url = found[1]
                return
            time.sleep(0.05)
        raise CumuloError(f"the server was not ready within {_START_S:g} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return Path(self._log.name).read_text("utf-8", "replace")[-4000:]


def cpu_s(pid: int | None) -> float | None:
    """Processor seconds that all threads of a process have used; None where the system does not tell."""
    fields = _proc(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None


def _proc(pid: int | None, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
