"""Warnings about a request that is answered all the same, sent in the header X-Cumulo-Warning.

`warn` may be called by anything that works on a request before its answer begins: a validator, an endpoint, also in
a thread that was started with the request's context (`asyncio.to_thread`). The gate opens a `Notes` for every
request and writes the header, for whole answers, streams and errors alike.
"""

from contextvars import ContextVar
from typing import Any

HEADER = b"x-cumulo-warning"
_MOST_TOLD = 8
_LONGEST_NAME = 64
_LONGEST_WARNING = 200


class Notes:
    """What is noted while one request is read. `lenient`: unknown fields of the request are ignored, too."""

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self._texts: dict[str, None] = {}
        self._root: Any = None
        # Kept by what they are, because a union may look at the same object several times.
        self._unknown: dict[tuple[int, str], Any] = {}

    def begin(self, data: Any) -> None:
        """The outermost object of a body, which is validated first: places are told from here."""
        if self._root is None:
            self._root = data

    def add(self, text: str) -> None:
        self._texts[text] = None

    def ignore(self, data: Any, name: str) -> None:
        """The field `name` of the object `data`, which is somewhere in the body, is ignored."""
        self._unknown[id(data), name] = data

    def header(self) -> bytes | None:
        """All warnings in one line of printable ASCII, however they were worded; None without any."""
        if not self._texts and not self._unknown:
            return None
        ignored = list(self._unknown)[:_MOST_TOLD]
        places = _places(self._root, {place for place, _ in ignored})
        told = [_printable(text, _LONGEST_WARNING) for text in list(self._texts)[:_MOST_TOLD]]
        for place, name in ignored:
            told.append(f"{_field(places.get(place, ''), name)} is not known here and was ignored")
        unsaid = len(self._texts) + len(self._unknown) - len(told)
        if unsaid:
            told.append(f"and {unsaid:,} more")
        return "; ".join(told).encode("ascii")


_notes: ContextVar[Notes | None] = ContextVar("cumulo_notes", default=None)


def warn(text: str) -> None:
    """Tell the client something about its request, in a header of the answer. Outside of a request: nothing."""
    notes = _notes.get()
    if notes is not None:
        notes.add(text)


def current() -> Notes | None:
    """The notes of the request that is worked on."""
    return _notes.get()


def open_notes(lenient: bool = False) -> Notes:
    """Begin the notes of a request, for the task that calls this and whatever it starts."""
    notes = Notes(lenient)
    _notes.set(notes)
    return notes


def _printable(text: str, longest: int) -> str:
    """A client's own words in a header: no line ends, no controls, nothing but ASCII, and not much of it."""
    shown = text[:longest] + ("..." if len(text) > longest else "")
    escaped = shown.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in escaped)


def _field(place: str, name: str) -> str:
    shown = _printable(name, _LONGEST_NAME)
    return f"{place}.{shown}" if place else shown


def _places(root: Any, wanted: set[int]) -> dict[int, str]:
    """Where these objects are in a body, as clients write it: `messages[1].content[0]`. Objects are found by what
    they are, not by what they hold: pydantic does not tell a validator where it is."""
    found: dict[int, str] = {}
    waiting: list[tuple[Any, str]] = [(root, "")]
    while waiting and len(found) < len(wanted):
        item, place = waiting.pop()
        if id(item) in wanted:
            found[id(item)] = place
        if isinstance(item, dict):
            inside = [(inner, name) for name, inner in item.items() if isinstance(inner, dict | list)]
            waiting += [(inner, _field(place, str(name))) for inner, name in inside]
        elif isinstance(item, list):
            parts = [(inner, index) for index, inner in enumerate(item) if isinstance(inner, dict | list)]
            waiting += [(inner, f"{place}[{index}]") for inner, index in parts]
    return found
