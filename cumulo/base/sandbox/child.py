"""The worker's own processes. Started by `Worker` with the name of the function that makes the job's code.

A keeper loads that code once and forks a child, which does the jobs. When a child breaks a limit the kernel ends
it; the keeper says so and forks the next one, which takes milliseconds because everything is loaded already. The
keeper ends when its owner does, however that went, and a child never outlives its keeper.
"""

import contextlib
import ctypes
import importlib
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

from cumulo.base.sandbox.frames import read_job, reply_frame

# A job: in, what the owner sent; out, a JSON header and raw bytes.
Work = Callable[[Any], tuple[dict[str, Any], bytes]]

_OWNER_GONE, _RENEW = 3, 4  # exit statuses of a child
_STACK_BYTES = (
    256 << 20
)  # compilers recurse along chains of rules; on a usual stack a long one ends the process
_REASONS: dict[int, str] = {
    signal.SIGPROF: "cpu time",
    signal.SIGXCPU: "cpu time",
    signal.SIGALRM: "time",
    signal.SIGABRT: "memory",  # how Rust ends where an allocation fails
    signal.SIGSEGV: "stack",
    signal.SIGBUS: "stack",
}
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = reply_frame({"ended": "memory"})  # made before: then there may be no memory for it


def main(entry: str) -> None:
    """`entry`: 'module:function'. The function gets what the owner sends first, and returns the Work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    owner, owner_pid = socket(fileno=0), os.getppid()
    try:
        setup, jobs_per_child = read_job(owner)
        module, _, function = entry.partition(":")
        work: Work = getattr(importlib.import_module(module), function)(setup)
    except EOFError:
        return
    except Exception as error:
        owner.sendall(reply_frame({"broken": f"{type(error).__name__}: {error}"}))
        return
    owner.sendall(reply_frame({"ready": os.getpid()}))
    _keep(work, jobs_per_child, owner, owner_pid)


# -- the keeper -------------------------------------------------------------------------------------------------
def _keep(work: Work, jobs_per_child: int, owner: socket, owner_pid: int) -> None:
    bell, ring = os.pipe()
    os.set_blocking(ring, False)
    signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.register(owner, 0)  # only: that the owner has closed it
    while True:
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _child(work, jobs_per_child, owner)
        status = os.waitstatus_to_exitcode(_wait_for(child, poll, bell, owner_pid))
        if status == _OWNER_GONE:
            return
        if status != _RENEW:
            owner.sendall(reply_frame({"ended": _REASONS.get(-status, "lost")}))


def _wait_for(child: int, poll: select.poll, bell: int, owner_pid: int) -> int:
    """The child's exit status. Ends the child when the owner is gone."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        for fd, _ in poll.poll(2000):
            if fd == bell:
                os.read(bell, 4096)
            else:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                sys.exit(0)
        if os.getppid() != owner_pid:  # another process may have inherited the other end of the pipe
            os.kill(child, signal.SIGKILL)
            sys.exit(0)


# -- the child --------------------------------------------------------------------------------------------------
def _child(work: Work, jobs_per_child: int, owner: socket) -> None:
    """Never returns. Jobs run in a thread, for its large stack."""
    keeper = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # Linux; elsewhere the time limits see to it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(_OWNER_GONE)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):  # no dumps, no files
        resource.setrlimit(kind, (0, 0))
    threading.stack_size(_STACK_BYTES)
    jobs = _Jobs(work, jobs_per_child, owner)
    thread = threading.Thread(target=jobs.run)
    signal.signal(signal.SIGVTALRM, lambda number, frame: jobs.give_way())
    thread.start()
    thread.join()
    os._exit(jobs.exit_status)


class _Jobs:
    def __init__(self, work: Work, count: int, owner: socket) -> None:
        self._work, self._left, self._owner = work, count, owner
        self.exit_status = 1

    def run(self) -> None:
        address_space = _address_space_bytes()
        while self._left:
            self._left -= 1
            try:
                (cpu_s, wall_s, memory_bytes, nice_after_s), job = read_job(self._owner)
            except EOFError:
                self.exit_status = _OWNER_GONE
                return
            most = address_space + memory_bytes if address_space else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            signal.setitimer(signal.ITIMER_VIRTUAL, nice_after_s)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            signal.setitimer(signal.ITIMER_REAL, wall_s)
            frame = self._do(job)
            # The timers stop before the reply is written: a frame is whole or not there.
            for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL):
                signal.setitimer(timer, 0)
            self._owner.sendall(frame)
        self.exit_status = _RENEW

    def _do(self, job: Any) -> bytes:
        try:
            header, payload = self._work(job)
            return reply_frame({"done": header}, payload)
        except MemoryError:
            self._left = 0
            return _OUT_OF_MEMORY
        except BaseException as error:  # llguidance's panics are not Exceptions
            self._left = 0
            return reply_frame({"failed": f"{type(error).__name__}: {error}"[:2000]})

    def give_way(self) -> None:
        """In the main thread, while the job runs. Nobody can be made important again, so it is the last job."""
        with contextlib.suppress(OSError):
            self._left = 0
            for thread in Path("/proc/self/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)


def _address_space_bytes() -> int:
    """0 where the system does not tell: then memory is bounded by the time there is to fill it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0
