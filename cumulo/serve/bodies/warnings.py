"""Warnings about a request that is answered all the same, sent in the header X-Cumulo-Warning.

`warn` may be called by anything that works on a request before its answer begins: a reader of its body, an
endpoint, also in a thread that was started with the request's context (`asyncio.to_thread`). The gate opens a
`Notes` for every request and writes the header, for whole answers, streams and errors alike.
"""

from contextvars import ContextVar

HEADER = b"x-cumulo-warning"
_MOST_TOLD = 8
_LONGEST_WARNING = 200


class Notes:
    """What is noted while one request is read. `lenient`: unknown fields of the request are ignored, too."""

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self.texts: dict[str, None] = {}

    def header(self) -> bytes | None:
        """All warnings in one line of printable ASCII, however they were worded; None without any."""
        told = [_printable(text) for text in list(self.texts)[:_MOST_TOLD]]
        if len(self.texts) > len(told):
            told.append(f"and {len(self.texts) - len(told):,} more")
        return "; ".join(told).encode("ascii") if told else None


_notes: ContextVar[Notes | None] = ContextVar("cumulo_notes", default=None)


def warn(text: str) -> None:
    """Tell the client something about its request, in a header of the answer. Outside of a request: nothing."""
    notes = _notes.get()
    if notes is not None:
        notes.texts[text] = None


def is_lenient() -> bool:
    """Whether the request that is worked on may have fields that nobody here knows."""
    notes = _notes.get()
    return notes is not None and notes.lenient


def open_notes(lenient: bool = False) -> Notes:
    """Begin the notes of a request, for the task that calls this and whatever it starts."""
    notes = Notes(lenient)
    _notes.set(notes)
    return notes


def _printable(text: str) -> str:
    """A client's own words in a header: no line ends, no controls, nothing but ASCII, and not much of it."""
    shown = text[:_LONGEST_WARNING] + ("..." if len(text) > _LONGEST_WARNING else "")
    escaped = shown.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in escaped)
