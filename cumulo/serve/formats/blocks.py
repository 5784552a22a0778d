"""Blocks: an answer's pieces gathered into thoughts, texts and calls, in order. Used by /v1/responses (as items)
and /v1/messages (as content blocks), whole or streamed: both only spell what changes here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from cumulo.serve.formats.events import Event, Text, ToolCallStart
from cumulo.serve.formats.reasoning import Reasoning

Kind = Literal["thoughts", "text", "call"]


@dataclass(slots=True)
class Block:
    kind: Kind
    index: int  # in the answer
    text: str = ""  # of a call: its arguments
    call_id: str = ""
    name: str = ""

    def arguments(self) -> dict[str, Any]:
        """Of a call, as an object; one that max_tokens cut gives what there is of it."""
        try:
            read = from_json(self.text, allow_partial=True)
        except ValueError:
            read = None
        return read if isinstance(read, dict) else {}


@dataclass(frozen=True, slots=True)
class BlockChange:
    what: Literal["begun", "grown", "ended"]
    block: Block
    text: str = ""  # of one that has grown: what is new


class Blocks:
    """Grows piece by piece. At any time at most the last block is unfinished."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False

    def add(self, pieces: Iterable[Reasoning | Event]) -> list[BlockChange]:
        changes: list[BlockChange] = []
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                changes += self._begin("call", piece.id, piece.name)
            elif isinstance(piece, Text | Reasoning):
                kind: Kind = "text" if isinstance(piece, Text) else "thoughts"
                if not self._open or self.blocks[-1].kind != kind:
                    changes += self._begin(kind)
                changes.append(self._grow(piece.text))
            else:
                changes.append(self._grow(piece.fragment))
        return changes

    def close(self) -> list[BlockChange]:
        """The answer is complete. One that says nothing at all is one empty text."""
        begun = [] if self.blocks else self._begin("text")
        return begun + self._end()

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> list[BlockChange]:
        ended = self._end()
        self.blocks.append(Block(kind, len(self.blocks), call_id=call_id, name=name))
        self._open = True
        return [*ended, BlockChange("begun", self.blocks[-1])]

    def _grow(self, text: str) -> BlockChange:
        self.blocks[-1].text += text
        return BlockChange("grown", self.blocks[-1], text)

    def _end(self) -> list[BlockChange]:
        if not self._open:
            return []
        self._open = False
        return [BlockChange("ended", self.blocks[-1])]
