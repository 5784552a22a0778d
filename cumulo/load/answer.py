"""One streamed answer as it arrives: when each piece of text came, how it ended, what the server counted.

Fed by a connection through `receive`; `client.py` turns it into a record. OpenAI's chat and completion
chunks are both understood.
"""

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

from cumulo.load.connection import Response


@dataclass(slots=True)
class EventReader:
    """`feed` returns the data of every event completed by the new bytes."""

    _rest: bytes = b""
    _data: list[bytes] = field(default_factory=list)  # the data lines of an event whose end has not come

    @property
    def unfinished(self) -> bool:
        """Whether the bytes so far end inside an event."""
        return bool(self._rest or self._data)

    def feed(self, piece: bytes) -> list[bytes]:
        piece = self._rest + piece
        # A carriage return at the very end may be half of a line end: leave it for the next piece.
        held = b"\r" if piece.endswith(b"\r") else b""
        if held:
            piece = piece[:-1]
        lines = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        events = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    events.append(b"\n".join(data))
                    data.clear()
            elif line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
        return events


_MOST_ERROR_BYTES = 64 << 10


class MalformedStream(Exception):
    """The body is not the event stream an OpenAI-compatible server sends."""


class ErrorInStream(Exception):
    """The server reported an error after it had begun to stream."""


@dataclass(slots=True)
class MeasuredAnswer:
    """Collects a response. Text is kept only where a later turn needs it."""

    keep_text: bool = False
    text: str = ""
    chunk_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    done: bool = False  # the closing [DONE] came
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    body: bytearray = field(default_factory=bytearray)  # of an answer that is no stream
    _events: EventReader = field(default_factory=EventReader)

    def receive(self, response: Response, piece: bytes, now_s: float) -> None:
        if response.status != 200:
            if len(self.body) < _MOST_ERROR_BYTES:
                self.body += piece
            return
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                self._take(json.loads(data), now_s)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise MalformedStream(f"not a chunk of an answer: {data[:80]!r} ({error})") from error

    def check_end(self, response: Response) -> None:
        """Raise what is wrong with a 200 answer that has ended."""
        if self.done or (self.finish_reason is not None and not self._events.unfinished):
            return
        kind = response.headers.get("content-type", "")
        if not self.chunk_times_s and "event-stream" not in kind:
            raise MalformedStream(f"the answer is no event stream but {kind or 'of no stated type'}")
        raise MalformedStream("the stream ended without a finish reason or [DONE]")

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        choices = event.get("choices")
        if choices:
            choice = choices[0]
            delta = choice.get("delta")
            if delta is None:
                text = choice.get("text")
            else:
                # Reasoning and tool calls are generated tokens too.
                text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
                if not text and delta.get("tool_calls"):
                    text = "\0"
            if text:
                self.chunk_times_s.append(now_s)
                if self.keep_text and text != "\0":
                    self.text += text
            if choice.get("finish_reason"):
                self.finish_reason = choice["finish_reason"]
        elif "error" in event:
            error = event["error"]
            raise ErrorInStream(str(error.get("message", error) if isinstance(error, dict) else error))
        elif choices is None:
            raise KeyError("no choices")
        usage = event.get("usage")
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens")
            self.completion_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens")
