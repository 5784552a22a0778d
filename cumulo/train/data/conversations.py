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
        name = "messages" if "messages" in row else "conversations"
        messages = _checked(row[name], "", name)
    elif "prompt" in row and "completion" in row:
        messages = _checked(row["prompt"], "user", "prompt")
        messages += _checked(row["completion"], "assistant", "completion")
    else:
        asked = _text(row["instruction"], "instruction")
        if row.get("input"):
            asked = f"{asked}\n\n{_text(row['input'], 'input')}"
        messages = _checked(asked, "user", "") + _checked(_text(row["output"], "output"), "assistant", "")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the conversation has no answer of an assistant to learn from")
    return messages


def _checked(turns: Any, role_of_text: str, name: str) -> list[dict[str, str]]:
    """Messages in a list, or one that is a text, where a text has a role here."""
    if isinstance(turns, str) and role_of_text:
        return [{"role": role_of_text, "content": turns}]
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
        messages.append({"role": ROLES.get(role, role), "content": content})
    return messages


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return value
