"""ToolCall: one call of a tool, put together from the pieces of a streamed answer. Part of an Answer."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ShownToolCall:
    id: str = ""
    name: str = ""
    arguments: str = ""

    def add_piece(self, piece: dict[str, Any]) -> None:
        self.id += piece.get("id") or ""
        function = piece.get("function") or {}
        self.name += function.get("name") or ""
        self.arguments += function.get("arguments") or ""

    @property
    def whole(self) -> bool:
        """Whether its arguments can be sent back; an answer that was cut may end in the middle of them."""
        try:
            return isinstance(json.loads(self.arguments or "{}"), dict)
        except ValueError:
            return False

    def message_part(self) -> dict[str, Any]:
        """As an assistant message of the API holds it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments or "{}"},
        }
