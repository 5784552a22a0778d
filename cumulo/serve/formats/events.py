"""The events that parsers of model output yield, and the collector of those of tool calls."""

import random
import secrets
import string
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

_CHARACTERS = string.ascii_letters + string.digits
_source: ContextVar[random.Random] = ContextVar("source of tool call ids")
_secret = random.SystemRandom()


def repeatable_call_ids(seed: str) -> None:
    """From here on, in this task, ids follow from the seed."""
    _source.set(random.Random(seed))


def random_call_id() -> str:
    source = _source.get(None)
    return f"call_{secrets.token_hex(12) if source is None else source.randbytes(12).hex()}"


def mistral_call_id() -> str:
    """Nine letters and digits: Mistral's own templates refuse other ids."""
    return "".join((_source.get(_secret)).choice(_CHARACTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int  # of the call in this answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments, as the model wrote them: the pieces together are JSON if it wrote JSON."""

    index: int
    fragment: str


Event = Text | ToolCallStart | ToolCallArguments


class Collector:
    """Gathers a parser's events; joins neighbours, numbers calls, keeps white space around calls back."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._events: list[Event] = []
        self._space = ""  # white space that is dropped if a call or the end follows
        self.calls = 0

    def text(self, text: str) -> None:
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        self._add_text(visible)

    def start(self, name: str) -> None:
        self._space = ""
        self._events.append(ToolCallStart(self.calls, self._new_id(), name))
        self.calls += 1

    def arguments(self, fragment: str) -> None:
        """Add to the arguments of the call that started last."""
        if self._events and isinstance(last := self._events[-1], ToolCallArguments):
            self._events[-1] = ToolCallArguments(last.index, last.fragment + fragment)
        elif fragment:
            self._events.append(ToolCallArguments(self.calls - 1, fragment))

    def end(self) -> None:
        if not self.calls:
            self._add_text(self._space)
        self._space = ""

    def drain(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _add_text(self, text: str) -> None:
        if self._events and isinstance(last := self._events[-1], Text):
            self._events[-1] = Text(last.text + text)
        elif text:
            self._events.append(Text(text))


def partial_marker(text: str, *markers: str) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
