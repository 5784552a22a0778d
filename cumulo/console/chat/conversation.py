"""Conversation: what was said on the chat page, as plain data that the browser keeps. Used by the chat page.

Entries are the API's messages with a few fields of our own: `files` of a user's message, `about` and `odds` of an
answer, `pending` where the server is still making the answer.
"""

import json
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

LARGEST_FILE_BYTES = 200_000
MOST_FILES = 5
LARGEST_STORED_BYTES = 700_000  # one message from the browser must carry it: sockets take a megabyte
_LONGEST_TITLE = 80
_ROLES = ("user", "assistant", "tool")
_NUMBERS = ("output_tokens", "ttft_s", "decode_s")
Entry = dict[str, Any]


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
        if not isinstance(stored, dict) or not isinstance(stored.get("entries"), list):
            return None
        if not isinstance(stored.get("id"), str) or not re.fullmatch(r"[0-9a-f]{24}", stored["id"]):
            return None
        if not all(map(_is_entry, stored["entries"])):
            return None
        title, updated_s = stored.get("title"), stored.get("updated_s")
        return cls(
            stored["id"],
            title if isinstance(title, str) else "",
            float(updated_s) if isinstance(updated_s, int | float) else 0.0,
            stored["entries"],
        )


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


def _is_entry(entry: Any) -> bool:
    """Whether it has the shape of what was stored; the page would fail on anything else."""
    if not isinstance(entry, dict) or entry.get("role") not in _ROLES:
        return False
    calls, odds, files = entry.get("tool_calls", []), entry.get("odds", []), entry.get("files", [])
    return (
        isinstance(entry.get("content"), str)
        and isinstance(calls, list)
        and all(map(_is_call, calls))
        and isinstance(odds, list)
        and all(map(_is_odds, odds))
        and read_files(files) == files
        and _is_about(entry.get("about", {}))
        and isinstance(entry.get("pending", ""), str)
        and isinstance(entry.get("undo", {}), dict)
    )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(call.get("id"), str)
        and all(isinstance(function.get(part), str) for part in ("name", "arguments"))
    )


def _is_odds(odds: Any) -> bool:
    return (
        isinstance(odds, list)
        and len(odds) == 3
        and isinstance(odds[0], str)
        and isinstance(odds[1], int | float)
        and isinstance(odds[2], str)
    )


def _is_about(about: Any) -> bool:
    return isinstance(about, dict) and all(
        value is None or isinstance(value, int | float if name in _NUMBERS else str)
        for name, value in about.items()
    )


def _size(entries: list[Entry]) -> int:
    return len(json.dumps(entries))
