"""Rows of other people's chat data as lists of messages: the builder of datasets reads them, `cumulo train` asks
what a file contains.

Four forms are read: `messages` (OpenAI, TRL), `prompt` and `completion`, Alpaca's `instruction`, `input` and
`output`, and ShareGPT's `conversations` of `from` and `value`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
}
FORMS = "messages; prompt and completion; instruction and output; or conversations"


def is_conversation(row: Any) -> bool:
    """Whether a row has one of the four forms, right or wrong inside."""
    if not isinstance(row, Mapping):
        return False
    wanted = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})
    return any(names <= row.keys() for names in wanted)


def as_messages(row: Any) -> list[dict[str, str]]:
    """The messages of a row. Raises ValueError with the reason where it has none."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a conversation is a JSON object, got {type(row).__name__}")
    if not is_conversation(row):
        fields = ", ".join(map(str, row)) or "none"
        raise ValueError(f"a conversation has the fields {FORMS}; the fields here are {fields}")
    if "messages" in row or "conversations" in row:
        turns = row["messages"] if "messages" in row else row["conversations"]
        messages = _checked(turns, "messages" if "messages" in row else "conversations")
    elif "prompt" in row and "completion" in row:
        messages = _side(row["prompt"], "user", "prompt") + _side(
            row["completion"], "assistant", "completion"
        )
    else:
        asked = _text(row["instruction"], "instruction")
        if row.get("input"):
            asked = f"{asked}\n\n{_text(row['input'], 'input')}"
        messages = [_message("user", asked), _message("assistant", _text(row["output"], "output"))]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the conversation has no answer of an assistant to learn from")
    return messages


def _side(content: Any, role: str, name: str) -> list[dict[str, str]]:
    """A prompt or a completion: a text, or messages as TRL writes them."""
    return [_message(role, content)] if isinstance(content, str) else _checked(content, name)


def _checked(turns: Any, name: str) -> list[dict[str, str]]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError(f"{name} must be a list of messages")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            raise ValueError(f"message {number} of {name} must be an object with a role and a content")
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"message {number} of {name} needs a role and a content, both text")
        messages.append(_message(ROLES.get(role, role), content))
    return messages


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return value


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
