"""Answers in the making: those that callers of `LLM` wait for, and those that they read token by token.

Whoever waits advances the engine for all: no thread runs behind the callers' backs.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

from cumulo.engine.engine import Engine
from cumulo.engine.outputs import Delta, RequestOutput


@dataclass(slots=True)
class AwaitedAnswer:
    """What has come of one request, until its caller has it."""

    request_id: str
    deltas: deque[Delta] = field(default_factory=deque)  # that its reader has not taken yet
    output: RequestOutput | None = None  # the whole answer, once it is finished


class Answers:
    """The answers of one engine that somebody waits for."""

    def __init__(self, engine: Engine) -> None:
        self.lock = threading.RLock()
        self._engine = engine
        self._expected: dict[str, AwaitedAnswer] = {}

    def expect(self, request_id: str) -> AwaitedAnswer:
        answer = self._expected[request_id] = AwaitedAnswer(request_id)
        return answer

    def step(self) -> None:
        """Advance the engine once and hand everyone what is theirs."""
        with self.lock:
            output = self._engine.step()
            for delta in output.deltas:
                if (answer := self._expected.get(delta.request_id)) is not None:
                    answer.deltas.append(delta)
            for finished in output.finished:
                if (answer := self._expected.get(finished.request_id)) is not None:
                    answer.output = finished

    def end(self, answer: AwaitedAnswer) -> None:
        """End it where it is; its output then has what was made so far."""
        with self.lock:
            if answer.output is None and self._engine.abort(answer.request_id):
                self.step()
            self.leave(answer)

    def leave(self, answer: AwaitedAnswer) -> None:
        """Nobody waits for it any more: if it is still running, it is aborted."""
        if self._expected.pop(answer.request_id, None) is not None and answer.output is None:
            self._engine.abort(answer.request_id)


class TokenStream(Iterator[Delta]):
    """An answer in the making. After the last Delta, `output` is the whole RequestOutput with its story."""

    def __init__(self, answers: Answers, answer: AwaitedAnswer) -> None:
        self._answers, self._answer, self.request_id = answers, answer, answer.request_id
        self.output: RequestOutput | None = None

    def __next__(self) -> Delta:
        while self.output is None:
            if self._answer.deltas:
                return self._answer.deltas.popleft()
            if self._answer.output is not None:
                self.close()
            else:
                self._answers.step()
        raise StopIteration

    def close(self) -> None:
        """Abort if it is still running; keeps what was made so far in `output`."""
        if self.output is None:
            self._answers.end(self._answer)
            self.output = self._answer.output

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
