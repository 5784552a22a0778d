"""Attempt: one start of a job as processes of this machine, which outlive whoever started them. The local
supervisor starts, asks and ends it.

A folder per attempt says all there is to know: `lock` is held as long as the job lives (whoever takes it knows
that it is gone), `pid` is that of its shell, `exit` its exit code. All processes that come of it have the folder in
their environment, so that none can be left behind, whatever died and whatever group it joined.
"""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cumulo.cluster.decide.recovery import own_exit_code

# The shell stays as the head of the process group, and writes down how the job ended.
_SHELL = (
    'echo $$ > "$0/pid"; "$@"; code=$?; echo $code > "$0/exit.new"; mv "$0/exit.new" "$0/exit"; exit $code'
)
_MARK = "CUMULO_ATTEMPT"
_END_S = 30.0  # after SIGKILL: a process in the middle of a slow disk's work


class Attempt:
    lost = ""  # this machine loses no nodes
    failed_on: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, command: Sequence[str], cwd: Path, output: Path, environment: Mapping[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock, output.open("ab") as stream:
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.Popen(
                ["/bin/sh", "-c", _SHELL, str(self.folder), *command], cwd=cwd,
                env={**environment, _MARK: str(self.folder)}, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, pass_fds=[lock.fileno()], start_new_session=True,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        if (self.folder / "exit").exists():
            return False
        try:
            with (self.folder / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # never started
        return False

    @property
    def exit_code(self) -> int | None:
        """The exit code; None: it was killed, or it still runs."""
        return own_exit_code(self._number("exit"))

    @property
    def pid(self) -> int | None:
        return self._number("pid")

    def ask_to_end(self) -> None:
        """The job, not its shell: a training run saves, and its exit code is written down."""
        shell, found = self.pid, self.processes()
        for pid, parent in found.items():
            if pid != shell and (parent == shell or parent not in found):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def end(self) -> None:
        """End at once what is left of it; returns when nothing is."""
        deadline = time.monotonic() + _END_S
        while (found := self.processes()) and time.monotonic() < deadline:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait_for_one(list(found))

    def processes(self) -> dict[int, int]:
        """Its processes, each with its parent."""
        mark, found = f"{_MARK}={self.folder}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = int(
                        (folder / "stat").read_text("utf-8").rpartition(")")[2].split()[1]
                    )
        return found

    def _number(self, name: str) -> int | None:
        try:
            return int((self.folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            return None


def _wait_for_one(pids: list[int]) -> None:
    """Until one of them has ended, or a second has passed."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pids[0])
        try:
            select.select([handle], [], [], 1.0)
        finally:
            os.close(handle)
