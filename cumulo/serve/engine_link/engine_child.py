"""EngineChild: one engine process and the two sockets to it. Owned by EngineClient; a restart makes a new one,
with new sockets, so that nothing an old process said can be taken for the new one's word.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import zmq

from cumulo.errors import CumuloError
from cumulo.serve.engine_link import early_start
from cumulo.serve.engine_link.messages import Command, EngineJob, Fatal, Ready, Report, decode_report, encode

_POLL_S = 0.05
# As plain integers: arithmetic with ZeroMQ's own is slow.
_NOW, _READABLE = int(zmq.NOBLOCK), int(zmq.POLLIN)
_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 108 bytes, ipc:// and all


class EngineStartError(CumuloError):
    """The engine process did not come up; the message says what it said."""


class EngineChild:
    def __init__(
        self,
        job: EngineJob,
        context: "zmq.Context[zmq.Socket[bytes]]",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._commands = context.socket(zmq.PUSH)
        self._reports = context.socket(zmq.PULL)
        self._bell: int | None = None  # the descriptor that tells of reports, once somebody listens
        self.misunderstood: Exception | None = None  # what it said that could not be read or taken in
        for socket in (self._commands, self._reports):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._commands.bind(job.commands_address)
        self._reports.bind(job.reports_address)
        self._process = early_start.take_process(environment)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: `ready` will say so
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def death(self) -> str | None:
        """How the process ended, in words; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    async def ended(self, patience_s: float) -> None:
        """Wait for the end of the process, but no longer than this."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        try:
            descriptor = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):  # not this system; or it has ended
            await asyncio.sleep(patience_s if self.death is None else 0)
            return
        loop.add_reader(descriptor, told.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await told.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    async def ready(self, timeout_s: float) -> Ready:
        """Wait until the model is loaded, or raise EngineStartError."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while loop.time() < deadline_s:
            died = self.death  # asked first: what it said before it died is then already here
            for report in self.reports():
                if isinstance(report, Ready):
                    return report
                if isinstance(report, Fatal):
                    raise EngineStartError(report.message)
            if died is not None:
                raise EngineStartError(f"the engine process {died} while it loaded the model")
            await asyncio.sleep(_POLL_S)
        raise EngineStartError(f"the engine did not load its model within {timeout_s:g} s")

    def reports(self) -> Iterator[Report]:
        """What it has said and nobody has read yet."""
        while self._has_reports:
            yield decode_report(self._reports.recv(_NOW))

    @property
    def _has_reports(self) -> bool:
        """Asked first: an attempt to read what is not there takes longer."""
        state: int = self._reports.getsockopt(zmq.EVENTS)  # type: ignore[assignment]
        return state & _READABLE != 0

    def listen(self, take: Callable[[Report], None]) -> None:
        """Hand every report to `take` as it comes, in the loop's own callback: no task is woken for it."""
        loop = asyncio.get_running_loop()

        def on_bell() -> None:
            if self._bell is None:  # it was rung before somebody said to listen no more
                return
            try:
                if self._has_reports:
                    take(decode_report(self._reports.recv(_NOW)))
                    # The bell rings only when something new comes, so all must be read; but first go those whom
                    # this report woke.
                    if self._has_reports:
                        loop.call_soon(on_bell)
            except Exception as error:
                self.misunderstood = error
                self.deafen()

        self._bell = int(self._reports.getsockopt(zmq.FD))
        loop.add_reader(self._bell, on_bell)
        on_bell()  # for what came before

    def deafen(self) -> None:
        if self._bell is not None:
            asyncio.get_running_loop().remove_reader(self._bell)
            self._bell = None

    def send(self, command: Command) -> bool:
        """False if the process is gone: whoever supervises it will see that, too."""
        try:
            self._commands.send(encode(command), _NOW)
            return True
        except zmq.Again:
            return False

    async def end(self, patience_s: float = 0.0) -> None:
        """Wait this long for it to end by itself, then kill it; close the sockets."""
        for _ in range(int(patience_s / 0.02)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        if self._process.poll() is None:
            self._process.kill()
        await asyncio.to_thread(self._process.wait)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.deafen()
        self._commands.close()
        self._reports.close()


def socket_folder_fits(folder: Path) -> bool:
    return len(str(folder)) <= _LONGEST_SOCKET_PATH - len("/commands-000000.ipc")
