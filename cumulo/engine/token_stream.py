"""Answers in the making: those that callers of `LLM` wait for, and those that they read token by token.

Whoever waits advances the engine for all: no thread runs behind the callers' backs.
"""

import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType

from cumulo.engine.engine import Engine
from cumulo.engine.outputs import Delta, RequestOutput


class Answers:
    """Of one engine, by request: what has come of each, until its caller has it."""

    def __init__(self, engine: Engine) -> None:
        self.lock = threading.RLock()
        self._engine = engine
        self._queues: dict[str, deque[Delta]] = {}  # of open streams
        self._outputs: dict[str, RequestOutput | None] = {}  # of requests somebody waits for

    def expect(self, request_id: str, streamed: bool = False) -> None:
        if streamed:
            self._queues[request_id] = deque()
        self._outputs[request_id] = None

    def step(self) -> None:
        """Advance the engine once and hand everyone what is theirs."""
        with self.lock:
            output = self._engine.step()
            for delta in output.deltas:
                if delta.request_id in self._queues:
                    self._queues[delta.request_id].append(delta)
            for finished in output.finished:
                if finished.request_id in self._outputs:
                    self._outputs[finished.request_id] = finished

    def output(self, request_id: str) -> RequestOutput | None:
        """The whole answer, once it is finished."""
        return self._outputs.get(request_id)

    def deltas(self, request_id: str) -> deque[Delta] | None:
        """What its reader has not taken yet; None: nobody reads it any more."""
        return self._queues.get(request_id)

    def leave(self, request_id: str) -> None:
        """Nobody waits for it any more: if it is still running, it is aborted."""
        if self.forget(request_id) is None:
            self._engine.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End it where it is; its output then has what was made so far."""
        if self._outputs.get(request_id) is None and self._engine.abort(request_id):
            self.step()

    def forget(self, request_id: str) -> RequestOutput | None:
        self._queues.pop(request_id, None)
        return self._outputs.pop(request_id, None)


class TokenStream(Iterator[Delta]):
    """An answer in the making. After the last Delta, `output` is the whole RequestOutput with its story."""

    def __init__(self, answers: Answers, request_id: str) -> None:
        self._answers, self.request_id = answers, request_id
        self.output: RequestOutput | None = None

    def __next__(self) -> Delta:
        while (waiting := self._answers.deltas(self.request_id)) is not None:
            if waiting:
                return waiting.popleft()
            self.output = self._answers.output(self.request_id)
            if self.output is not None:
                self._answers.forget(self.request_id)
            else:
                self._answers.step()
        raise StopIteration

    def close(self) -> None:
        """Abort if it is still running; keeps what was made so far in `output`."""
        if self._answers.deltas(self.request_id) is None:
            return
        with self._answers.lock:
            self._answers.abort(self.request_id)
            self.output = self._answers.forget(self.request_id)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
