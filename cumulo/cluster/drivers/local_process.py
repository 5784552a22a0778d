"""One attempt at a job as a process of this machine, which outlives whoever started it.

A folder per attempt says all there is to know: `lock` is held as long as the process lives (whoever takes it, knows
that it is gone), `pid` is its process group, `exit` its exit code.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# The shell stays as the head of the process group, and writes down how the job ended.
_SHELL = (
    'echo $$ > "$0/pid"; "$@"; code=$?; echo $code > "$0/exit.new"; mv "$0/exit.new" "$0/exit"; exit $code'
)


class Attempt:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, command: Sequence[str], cwd: Path, output: Path, environment: Mapping[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock, output.open("ab") as stream:
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.Popen(
                ["/bin/sh", "-c", _SHELL, str(self.folder), *command], cwd=cwd, env=dict(environment),
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, pass_fds=[lock.fileno()],
                start_new_session=True,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
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
        """None: it was killed, shell and all, or it still runs."""
        return self._number("exit")

    @property
    def pid(self) -> int | None:
        return self._number("pid")

    def signal(self, number: int) -> None:
        """To all its processes, if it lives; the shell ignores none, so it ends with them."""
        if self.alive and (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def ask_to_end(self) -> None:
        """The job, not its shell: a training run saves, and its exit code is written down."""
        if (pid := self.pid) is None or not self.alive:
            return
        for child in _children(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    def _number(self, name: str) -> int | None:
        try:
            return int((self.folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            return None


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8")
        return [int(word) for word in text.split()]
    except OSError:
        pass
    # Not every kernel has that file.
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text("utf-8").rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found
