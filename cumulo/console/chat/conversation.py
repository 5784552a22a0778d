"""Conversation: what was said on the chat page, as plain data that the browser keeps. Used by the chat page.

Entries are the API's messages with a few fields of our own: `parent`, `files` of a user's message and the `summary`
that is sent instead of what comes before it, `about` and `odds` of an answer, `beside` of compared answers,
`pending` where the server is still making the answer.
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
LARGEST_STORED_BYTES = 2_000_000  # browsers give all conversations together about five million characters
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
    limited_by: str | None
    earlier_tokens: float | None


class _StoredEntry(TypedDict):
    """What the page needs to draw an entry; it would fail on anything else."""

    role: Literal["user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[_Call]]
    odds: NotRequired[list[tuple[str, float, str]]]
    files: NotRequired[list[dict[str, str]]]
    about: NotRequired[_About]
    pending: NotRequired[str]
    parent: NotRequired[int]
    summary: NotRequired[str]
    beside: NotRequired[str]


class _Stored(TypedDict):
    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{24}$")]
    entries: list[_StoredEntry]
    title: NotRequired[str]
    updated_s: NotRequired[float]
    leaf: NotRequired[int]
    queued: NotRequired[list[_StoredEntry]]


_STORED = TypeAdapter(_Stored)


@dataclass(slots=True)
class Conversation:
    """A tree: every entry has a `parent`, the place of the entry that it follows (-1: it begins the conversation).
    Entries that follow the same one are versions of each other; `leaf` ends the branch that is shown and sent."""

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    title: str = ""  # empty: named after its first message
    updated_s: float = 0.0  # seconds since the epoch
    nodes: list[Entry] = field(default_factory=list)  # an entry stands behind the one that it follows
    leaf: int = -1
    queued: list[Entry] = field(default_factory=list)  # messages to send when the answer under way has ended

    @classmethod
    def from_entries(cls, entries: list[Entry], leaf: int | None = None, **about: Any) -> "Conversation":
        """Entries without a parent follow the one before them."""
        nodes = [{"parent": place - 1, **entry} for place, entry in enumerate(entries)]
        return cls(nodes=nodes, leaf=len(nodes) - 1 if leaf is None else leaf, **about)

    @property
    def entries(self) -> list[Entry]:
        """The shown branch, from the first message on."""
        branch, place = [], self.leaf
        while place >= 0:
            branch.append(self.nodes[place])
            place = self.nodes[place]["parent"]
        return branch[::-1]

    # -- the tree -----------------------------------------------------------------------------------------
    def add(self, entry: Entry, parent: int | None = None) -> Entry:
        """Put an entry behind another one, or at the end of the shown branch, and show it."""
        entry["parent"] = self.leaf if parent is None else parent
        self.nodes.append(entry)
        self.leaf = len(self.nodes) - 1
        return entry

    def place(self, entry: Entry) -> int:
        return next(place for place, node in enumerate(self.nodes) if node is entry)

    def versions(self, entry: Entry) -> list[Entry]:
        """The entry and those that stand in its place on other branches."""
        is_user, there = entry["role"] == "user", self._followers(entry["parent"])
        return [self.nodes[n] for n in there if (self.nodes[n]["role"] == "user") == is_user]

    def choose(self, entry: Entry) -> None:
        """Show the branch of an entry, to its newest end."""
        self._descend(self.place(entry))

    def _descend(self, place: int) -> None:
        self.leaf = place
        while followers := self._followers(self.leaf):
            self.leaf = followers[-1]

    def _followers(self, place: int) -> list[int]:
        return [n for n, node in enumerate(self.nodes) if node["parent"] == place]

    def take_back(self, answer: Entry | None = None) -> list[Entry]:
        """Take out a refused answer and what was said for it alone: the last message, or results of tools. What
        stood there before is shown."""
        gone, place, role = list[int](), self.leaf, ""
        if answer is not None:
            gone, place = [self.place(answer)], answer["parent"]
        while place >= 0 and role != "user" and self.nodes[place]["role"] != "assistant":
            if any(n not in gone for n in self._followers(place)):
                break
            gone.append(place)
            place, role = self.nodes[place]["parent"], self.nodes[place]["role"]
        taken = [self.nodes[one] for one in gone]
        self._keep([one for one in range(len(self.nodes)) if one not in gone], place)
        self._descend(self.leaf)
        return taken

    def delete_turn(self, entry: Entry) -> None:
        """Take out a user's message and what answers it; later messages follow what stood before it."""
        first, before = self.place(entry), entry["parent"]
        gone, shown = {first}, self.leaf
        for place, node in enumerate(self.nodes):
            if node["parent"] in gone and node["role"] == "user":
                node["parent"] = before
            elif node["parent"] in gone:
                gone.add(place)
        places = [place for place in range(len(self.nodes)) if place not in gone]
        self._keep(places, before if shown in gone else shown)
        if shown in gone:
            self._descend(self.leaf)

    def _keep(self, places: list[int], leaf: int) -> None:
        moved = {old: new for new, old in enumerate(places)} | {-1: -1}
        self.nodes = [self.nodes[place] for place in places]
        for node in self.nodes:
            node["parent"] = moved[node["parent"]]
        self.leaf = moved[leaf]

    # -- what is sent -------------------------------------------------------------------------------------
    def messages(self) -> list[Entry]:
        """For the API, from the last summary on: what failed without a word is left out, and files become fenced
        blocks."""
        return [_message(entry) for entry in self.entries[self.start :] if _says_something(entry)]

    def branch(self, leaf: int | None = None) -> "Conversation":
        """The branch to `leaf`, or the shown one, as it is now: it does not grow with the conversation."""
        return Conversation(nodes=list(self.nodes), leaf=self.leaf if leaf is None else leaf)

    @property
    def start(self) -> int:
        """The place in the branch from which on entries are sent; a summary stands for what is before."""
        summed = [place for place, entry in enumerate(self.entries) if entry.get("summary")]
        return summed[-1] if summed else 0

    @property
    def summary(self) -> str:
        entries = self.entries
        return str(entries[self.start].get("summary", "")) if entries else ""

    def turn_starts(self) -> list[int]:
        """The places in the branch of the user's messages that may be sent."""
        return [n for n, entry in enumerate(self.entries) if n >= self.start and entry["role"] == "user"]

    def name(self) -> str:
        said = next((entry["content"] for entry in self.nodes if entry["role"] == "user"), "")
        return self.title or " ".join(said.split())[:_LONGEST_TITLE] or "New chat"

    # -- the browser's storage ----------------------------------------------------------------------------
    def stored(self) -> dict[str, Any]:
        """The conversation as JSON-ready data, within the bound: probabilities of tokens are dropped first, then
        other branches than the shown one, then old turns."""
        self.updated_s = time.time()
        kept = self
        if _size(kept.nodes) > LARGEST_STORED_BYTES:
            slim = [{k: v for k, v in e.items() if k != "odds"} for e in self.nodes]
            kept = self.from_entries(slim, self.leaf)
        if _size(kept.nodes) > LARGEST_STORED_BYTES:
            kept = self.from_entries([_loose(entry) for entry in kept.entries])
        while _size(kept.nodes) > LARGEST_STORED_BYTES and kept.nodes:
            rest = kept.nodes[1:]
            while rest and rest[0]["role"] != "user":
                rest = rest[1:]
            kept = self.from_entries([_loose(entry) for entry in rest])
        return {
            "id": self.id,
            "title": self.title,
            "name": self.name(),
            "updated_s": self.updated_s,
            "entries": [_loose(one) if one["parent"] == n - 1 else one for n, one in enumerate(kept.nodes)],
            "leaf": kept.leaf,
            "queued": self.queued,
        }

    @classmethod
    def from_stored(cls, stored: Any) -> "Conversation | None":
        """The stored conversation; None if it is none, since a browser's storage can hold anything."""
        try:
            kept = _STORED.validate_json(json.dumps(stored), strict=True)
        except ValidationError:
            return None
        entries, queued = stored["entries"], stored.get("queued", [])
        if not all(read_files(one.get("files", [])) == one.get("files", []) for one in (*entries, *queued)):
            return None
        leaf = kept.get("leaf", len(entries) - 1)
        parents = [entry.get("parent", place - 1) for place, entry in enumerate(entries)]
        if not (-1 <= leaf < len(entries) and all(-1 <= parent < n for n, parent in enumerate(parents))):
            return None
        about = {"id": kept["id"], "title": kept.get("title", ""), "updated_s": kept.get("updated_s", 0.0)}
        return cls.from_entries(entries, leaf, queued=queued, **about)


def user_entry(text: str, files: list[dict[str, str]] | None = None) -> Entry:
    return {"role": "user", "content": text} | ({"files": files} if files else {})


def _loose(entry: Entry) -> Entry:
    return {name: value for name, value in entry.items() if name != "parent"}


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
    return len(json.dumps(entries, ensure_ascii=False))
