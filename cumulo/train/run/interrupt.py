"""StopRequest: Ctrl-C (or a scheduler's SIGTERM) asks a run to finish its step and save. Used by the trainer."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While entered, the first signal sets `asked`; the second does what it always did."""

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        """`heard` is called at the first signal, so that the person who sent it can be told."""
        self.asked = False
        self._heard = heard
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()
        self._heard()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
