"""Worker: the owner's end of a killable process. Used by guided decoding and by chat templates.

The process is started at the first job, or earlier with `start`. It answers one job at a time; a job that breaks
its limits is ended by the kernel and raises JobEnded here, and the worker takes the next one.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cumulo.base.sandbox.frames import Reply, is_quiet, job_frame, receive_reply, send_job

MIB = 1 << 20

# Why the kernel, or the worker itself, ended a job. "lost": the process went away for another reason.
Reason = Literal["cpu time", "time", "memory", "stack", "lost"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one job. The kernel enforces them, so no code in the job can pass over them."""

    cpu_s: float  # processor time
    wall_s: float  # longer than cpu_s: a busy machine is not the job's fault
    memory_bytes: int  # address space beyond what the worker needs by itself
    nice_after_s: float = 0.1  # a job that takes longer than this gives way to everything else on the machine


class JobEnded(Exception):
    """A job went past its limits, or its process died of it. Nothing of it is left running."""

    def __init__(self, reason: Reason, limits: Limits) -> None:
        self.reason, self.limits = reason, limits
        super().__init__(self.words)

    @property
    def words(self) -> str:
        """The reason as the end of a sentence: 'it ...'."""
        return {
            "cpu time": f"it takes more than {self.limits.cpu_s:g} s of processor time",
            "time": f"it takes more than {self.limits.wall_s:g} s",
            "memory": f"it needs more than {self.limits.memory_bytes // MIB:,} MiB of memory",
            "stack": "it is nested too deeply",
            "lost": "the process that worked on it died",
        }[self.reason]


class JobFailed(Exception):
    """The job's own code raised an error that it did not expect: a fault of ours, not of the job's author."""


class WorkerUnavailable(Exception):
    """The worker process could not be started or did not answer: the text says which."""


_START_LIMIT_S = 60.0  # for loading the code on a busy machine
_GRACE_S = 3.0  # beyond a job's own limit, before the owner itself ends a worker that does not answer
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from cumulo.base.sandbox.child import main; main(sys.argv[2])"
)
# What a program needs to find its libraries and its language; secrets in the environment stay outside.
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")
# One thread and one arena: address space then says how much memory a job takes.
_OWN_VARIABLES = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Worker:
    """Used from any thread; calls take turns."""

    def __init__(
        self, entry: str, setup: Callable[[], Any] = lambda: None, *, jobs_per_child: int = -1
    ) -> None:
        """`entry`: 'module:function', called in the process with what `setup` returns; it returns the job's code.
        `jobs_per_child`: after so many jobs a fresh process takes over, whose memory is as at the start."""
        self._entry, self._setup, self._jobs_per_child = entry, setup, jobs_per_child
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.started = 0  # processes so far

    def start(self) -> None:
        """Load the code now rather than at the first job. WorkerUnavailable if it cannot be."""
        with self._lock:
            self._running()

    def call(self, job: Any, limits: Limits) -> Reply:
        """What the job's code returned. Raises JobEnded, JobFailed or WorkerUnavailable; ValueError for a job that
        is not made of plain values."""
        frame = job_frame(((limits.cpu_s, limits.wall_s, limits.memory_bytes, limits.nice_after_s), job))
        with self._lock:
            try:
                return self._exchange(frame, limits)
            except (JobEnded, JobFailed):
                raise
            except BaseException:  # also Ctrl-C: an answer that comes later belongs to nobody
                self._kill()
                raise

    def close(self) -> None:
        """End the process. A call that waits for it in another thread ends with JobEnded."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._kill()

    def _exchange(self, frame: bytes, limits: Limits) -> Reply:
        worker = self._running()
        deadline_s = time.monotonic() + limits.wall_s + _GRACE_S
        try:
            send_job(worker, frame, deadline_s)
            header, payload = receive_reply(worker, deadline_s)
        except TimeoutError:
            self._kill()
            raise JobEnded("time", limits) from None
        except (EOFError, OSError, ValueError):
            self._kill()
            raise JobEnded("lost", limits) from None
        if isinstance(done := header.get("done"), dict):
            return done, payload
        if "failed" in header:
            raise JobFailed(str(header["failed"]))
        reason: Reason = next((known for known in REASONS if known == header.get("ended")), "lost")
        if reason == "lost":
            self._kill()  # a child that was killed may have left half a job behind
        raise JobEnded(reason, limits)

    def _running(self) -> socket.socket:
        process, known = self._process, self._socket
        if process is not None and known is not None and process.poll() is None and is_quiet(known):
            return known
        self._kill()
        if self._closed:
            raise WorkerUnavailable("the worker is closed")
        try:
            return self._start()
        except (OSError, EOFError, ValueError) as error:
            self._kill()
            raise WorkerUnavailable(f"its process did not start ({type(error).__name__}: {error})") from error

    def _start(self) -> socket.socket:
        paths = [str(Path(path).absolute()) for path in sys.path]
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(paths), self._entry],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
                | _OWN_VARIABLES,
                start_new_session=True,  # Ctrl-C in the terminal is the owner's
            )
        self.started += 1
        deadline_s = time.monotonic() + _START_LIMIT_S
        send_job(self._socket, job_frame((self._setup(), self._jobs_per_child)), deadline_s)
        header, _ = receive_reply(self._socket, deadline_s)
        if "ready" not in header:
            raise ValueError(header.get("broken", "no reason given"))
        return self._socket

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # its child dies with it
            process.wait()
        if self._socket is not None:
            self._socket.close()
