"""AnswerReader: takes one answer apart into thoughts, text and tool calls. One per choice of a chat completion.

The whole answer and the streamed one are read by the same parsers, so they never differ.
"""

from collections.abc import Iterable
from typing import Any

from cumulo.serve.formats import (
    Event,
    Reasoning,
    ReasoningParser,
    Text,
    ToolCallArguments,
    ToolCallParser,
    ToolCallStart,
)

Piece = Reasoning | Event


class AnswerReader:
    def __init__(
        self, thoughts: ReasoningParser | None, calls: ToolCallParser | None, *, parallel: bool = True
    ) -> None:
        """`parallel` False: only the first call counts, whatever the model writes."""
        self._thoughts, self._calls, self._parallel = thoughts, calls, parallel
        self.called = False

    def read(self, text: str, last: bool) -> list[Piece]:
        """What this next piece of the answer adds; `last`: nothing follows."""
        parts: list[Reasoning | Text] = [Text(text)] if text else []
        if self._thoughts is not None:
            parts = self._thoughts.push(text) + (self._thoughts.finish() if last else [])
        pieces: list[Piece] = []
        for part in parts:
            pieces += self._calls.push(part.text) if self._calls and isinstance(part, Text) else [part]
        if self._calls is not None and last:
            pieces += self._calls.finish()
        if not self._parallel:
            pieces = [piece for piece in pieces if not _is_further_call(piece)]
        self.called = self.called or any(isinstance(piece, ToolCallStart) for piece in pieces)
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.called else reason


def _is_further_call(piece: Piece) -> bool:
    return isinstance(piece, ToolCallStart | ToolCallArguments) and piece.index > 0


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The assistant's message that a whole answer makes."""
    text, thoughts = "", ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Text):
            text += piece.text
        elif isinstance(piece, Reasoning):
            thoughts += piece.text
        elif isinstance(piece, ToolCallStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.fragment
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def delta_of(piece: Piece) -> dict[str, Any]:
    """The same, as a streamed chunk says it."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    if isinstance(piece, ToolCallStart):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.fragment}}]}
