"""Conversation: what was said on the chat page, as plain data that the browser keeps. Used by the chat page.

Entries are the API's messages with a few fields of our own: `files` of a user's message, `about` and `odds` of an
answer, `pending` where the server is still making the answer.
"""

import json
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

from pydantic import StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict

LARGEST_FILE_BYTES = 200_000
MOST_FILES = 5
LARGEST_STORED_BYTES = 700_000  # one message from the browser must carry it: sockets take a megabyte
_LONGEST_TITLE = 80
Entry = dict[str, Any]


class _Function(TypedDict):
    name: str
    arguments: str


class _Call(TypedDict):
    id: str
    function: _Function


class _About(TypedDict, total=False):
    request_id: str | None
    model: str | None
    output_tokens: float | None
    finish_reason: str | None
    problem: str | None
    ttft_s: float | None
    decode_s: float | None


class _StoredEntry(TypedDict):
    """What the page needs to draw an entry; it would fail on anything else."""

    role: Literal["user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[_Call]]
    odds: NotRequired[list[tuple[str, float, str]]]
    files: NotRequired[list[dict[str, str]]]
    about: NotRequired[_About]
    pending: NotRequired[str]
    undo: NotRequired[dict[str, Any]]


class _Stored(TypedDict):
    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{24}$")]
    entries: list[_StoredEntry]
    title: NotRequired[str]
    updated_s: NotRequired[float]


_STORED = TypeAdapter(_Stored)


@dataclass(slots=True)
class Conversation:
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    title: str = ""  # empty: named after its first message
    updated_s: float = 0.0  # seconds since the epoch
    entries: list[Entry] = field(default_factory=list)

    def say(self, text: str, files: list[dict[str, str]] | None = None) -> None:
        entry: Entry = {"role": "user", "content": text}
        if files:
            entry["files"] = files
        self.entries.append(entry)

    def messages(self) -> list[Entry]:
        """For the API: what failed without a word is left out, and files become fenced blocks."""
        return [_message(entry) for entry in self.entries if _says_something(entry)]

    def turn_of(self, index: int) -> range:
        """The entries of the turn that an entry belongs to: a user's message and everything that answers it."""
        first = index
        while first > 0 and self.entries[first]["role"] != "user":
            first -= 1
        after = first + 1
        while after < len(self.entries) and self.entries[after]["role"] != "user":
            after += 1
        return range(first, after)

    def delete_turn(self, index: int) -> None:
        turn = self.turn_of(index)
        del self.entries[turn.start : turn.stop]

    def name(self) -> str:
        said = next((e["content"] for e in self.entries if e["role"] == "user"), "")
        return self.title or " ".join(said.split())[:_LONGEST_TITLE] or "New chat"

    # -- the browser's storage ----------------------------------------------------------------------------
    def stored(self) -> dict[str, Any]:
        """The conversation as JSON-ready data, within the bound: probabilities of tokens are dropped first, then
        old turns."""
        self.updated_s = time.time()
        entries = self.entries
        if _size(entries) > LARGEST_STORED_BYTES:
            entries = [{k: v for k, v in entry.items() if k != "odds"} for entry in entries]
        while _size(entries) > LARGEST_STORED_BYTES and entries:
            entries = entries[len(Conversation(entries=entries).turn_of(0)) :]
        return {
            "id": self.id,
            "title": self.title,
            "name": self.name(),
            "updated_s": self.updated_s,
            "entries": entries,
        }

    @classmethod
    def from_stored(cls, stored: Any) -> "Conversation | None":
        """The stored conversation; None if it is none, since a browser's storage can hold anything."""
        try:
            kept = _STORED.validate_json(json.dumps(stored), strict=True)
        except ValidationError:
            return None
        if not all(read_files(entry.get("files", [])) == entry.get("files", []) for entry in kept["entries"]):
            return None
        return cls(kept["id"], kept.get("title", ""), kept.get("updated_s", 0.0), stored["entries"])


def fenced(name: str, text: str) -> str:
    """A file in a message: its name and its text in a fence that the text itself cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"File: {name}\n{fence}\n{text.rstrip()}\n{fence}"


def read_files(given: Any) -> list[dict[str, str]]:
    """Files as a page sends them; what is no text file within the bounds is left out."""
    if not isinstance(given, list):
        return []
    files = []
    for one in given[:MOST_FILES]:
        name, text = (one.get("name"), one.get("text")) if isinstance(one, dict) else (None, None)
        if isinstance(name, str) and isinstance(text, str) and len(text) <= LARGEST_FILE_BYTES:
            files.append({"name": " ".join(name.split())[:120], "text": text})
    return files


def _message(entry: Entry) -> Entry:
    kept: Entry = {k: entry[k] for k in ("role", "content", "tool_calls", "tool_call_id") if k in entry}
    if entry.get("files"):
        kept["content"] = "\n\n".join(
            [*(fenced(one["name"], one["text"]) for one in entry["files"]), kept["content"]]
        ).strip()
    return kept


def _says_something(entry: Entry) -> bool:
    return bool(entry["content"] or entry.get("tool_calls") or entry.get("files") or entry["role"] == "tool")


def _size(entries: list[Entry]) -> int:
    return len(json.dumps(entries))
