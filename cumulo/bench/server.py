"""A `cumulo serve` of one's own for a benchmark: started on a free port, watched, ended by its id."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from cumulo.errors import CumuloError

_START_S = 900.0


class ServerProcess:
    """The API process and, below it, the engine's. Leaving the `with` stops both."""

    def __init__(self, model: str | None, options: Sequence[str]) -> None:
        # A file, not a pipe: nobody reads while the server writes.
        self._log = tempfile.NamedTemporaryFile(prefix="cumulo-serve-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "cumulo.cli", "serve", *([model] if model else []), "--port", "0"]
        self._process = subprocess.Popen([*command, *options], stdout=self._log, stderr=self._log)
        self.url = ""

    def __enter__(self) -> "ServerProcess":
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def cpu_s(self) -> float | None:
        """Processor seconds the API process has used; None where the system does not tell."""
        return _cpu_s(self._process.pid)

    @property
    def engine_cpu_s(self) -> float | None:
        """The same of the engine's process."""
        engine = next((pid for pid in _children(self._process.pid) if _is_engine(pid)), None)
        return None if engine is None else _cpu_s(engine)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
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
            if not self.url and (found := re.search(r"listening on (http://\S+);", self._log_tail())):
                self.url = found[1]
            if self.url and self._is_ready():
                return
            time.sleep(0.05)
        raise CumuloError(f"the server was not ready within {_START_S:g} s:\n{self._log_tail()}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _log_tail(self) -> str:
        return Path(self._log.name).read_text("utf-8", "replace")[-4000:]


def _cpu_s(pid: int) -> float | None:
    """User and system time of all threads, from /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def _is_engine(pid: int) -> bool:
    try:
        return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
