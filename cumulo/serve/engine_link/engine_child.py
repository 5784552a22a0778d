"""EngineChild: one engine process and the line to it. Owned by EngineClient; a restart makes a new one, with a
new line, so that nothing an old process said can be taken for the new one's word.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from cumulo.errors import CumuloError
from cumulo.serve.engine_link import early_start
from cumulo.serve.engine_link.engine_settings import Trouble
from cumulo.serve.engine_link.message_line import MessageLine
from cumulo.serve.engine_link.messages import Command, EngineJob, Fatal, Ready, Report, decode_report, encode

_POLL_S = 0.05
_TICK_S = 0.2


class EngineStartError(CumuloError):
    """The engine process did not come up; the message says what it said."""


class EngineChild:
    def __init__(self, job: EngineJob, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._unread: deque[bytes] = deque()
        self._take: Callable[[Report], None] | None = None  # who listens
        self.to_be_replaced = False  # somebody asked for it
        self.misunderstood: Exception | None = None  # what it said that could not be read or taken in
        self._process, connection = early_start.take_process(environment)
        self._line = MessageLine(connection)
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

    async def trouble(
        self, progress: Callable[[], tuple[int, ...] | None], stall_timeout_s: float
    ) -> Trouble:
        """Returns what is wrong, as soon as something is. `progress`: what grows while the engine is alive; None
        while it has no work, and may stand still."""
        loop = asyncio.get_running_loop()
        still_s, ticked_s = 0.0, loop.time()
        seen: tuple[int, ...] | None = None
        while True:
            await self.ended(_TICK_S)
            now_s = loop.time()
            if self.misunderstood is not None:
                return Trouble(f"said something that cannot be understood ({self.misunderstood!r})")
            if (death := self.death) is not None:
                return Trouble(death)
            if self.to_be_replaced:
                return Trouble("is restarted as asked", planned=True)
            done = progress()
            # Counted in ticks, so that a machine that slept does not blame the engine.
            still_s = 0.0 if done is None or done != seen else still_s + min(now_s - ticked_s, 2 * _TICK_S)
            seen, ticked_s = done, now_s
            if still_s >= stall_timeout_s:
                return Trouble(f"finished no step for {stall_timeout_s:g} s although it had work")

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
        while self._unread or self._hear():
            yield decode_report(self._unread.popleft())

    def _hear(self) -> bool:
        """Whether there is something new."""
        self._unread.extend(self._line.receive())
        return bool(self._unread)

    def listen(self, take: Callable[[Report], None]) -> None:
        """Hand every report to `take` as it comes, in the loop's own callback: no task is woken for it."""
        self._take = take
        asyncio.get_running_loop().add_reader(self._line.fileno(), self._on_readable)
        if self._unread:
            self._take_one()

    def _on_readable(self) -> None:
        if not self._unread and not self._hear() and self._line.closed:
            self.stop_listening()  # its end, which whoever supervises it sees, too
        self._take_one()

    def _take_one(self) -> None:
        """The oldest report; those behind it come after whoever this one wakes."""
        if self._take is None or not self._unread:
            return
        try:
            self._take(decode_report(self._unread.popleft()))
        except Exception as error:
            self.misunderstood = error
            self.stop_listening()
        if self._unread:
            asyncio.get_running_loop().call_soon(self._take_one)

    def stop_listening(self) -> None:
        if self._take is not None:
            asyncio.get_running_loop().remove_reader(self._line.fileno())
            self._take = None

    def send(self, command: Command) -> None:
        with contextlib.suppress(OSError):  # the process is gone, which whoever watches it sees, too
            self._line.send(encode(command))
            if self._line.has_unsent:
                asyncio.get_running_loop().add_writer(self._line.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        with contextlib.suppress(OSError):
            self._line.flush()
            if self._line.has_unsent:
                return
        asyncio.get_running_loop().remove_writer(self._line.fileno())

    async def end(self, patience_s: float = 0.0) -> None:
        """Wait this long for it to end by itself, then kill it; close the line."""
        if patience_s:
            await self.ended(patience_s)
        if self._process.poll() is None:
            self._process.kill()
        await asyncio.to_thread(self._process.wait)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.stop_listening()
        asyncio.get_running_loop().remove_writer(self._line.fileno())
        self._line.close()
