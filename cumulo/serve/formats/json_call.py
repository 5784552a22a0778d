"""JsonCall: reads one `{"name": ..., "arguments": {...}}` as it comes. Used by the tool-call parsers.

The object's own level is read strictly: there it is decided whether this is a call at all. The arguments are
only followed to their end, by strings and brackets, and passed on as written.
"""

import json
from collections.abc import Collection
from enum import Enum, auto

from cumulo.serve.formats.events import Collector

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)


class JsonValue:
    """Follows one JSON value to its end, a character at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._begun = False
        self.done = False

    def feed(self, character: str) -> bool:
        """False: the value ended before this character (a number, true, false or null)."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self.done = self._depth == 0
            return True
        if self._depth == 0 and self._begun and (character in _SPACE or character in ",}]"):
            self.done = True
            return False
        self._begun = True
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        return True


class _At(Enum):
    OPENING = auto()
    FIRST_KEY = auto()  # or the closing bracket
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER_VALUE = auto()


class JsonCall:
    """One call object. `started` once it is certain: from then on the arguments stream to the collector."""

    def __init__(self, collector: Collector, *, bare: bool = False, offered: Collection[str] = ()) -> None:
        """`bare`: no marker stands before it, so any other JSON object must be told from a call, and soon:
        by its keys, and by its name if the tools `offered` are known."""
        self._collector = collector
        self._bare, self._offered = bare, offered
        self._at = _At.OPENING
        self._value = JsonValue()
        self._piece: list[str] = []  # the key or value being read
        self._streams = False  # the value being read are arguments, passed on as they come
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # read before the name was known, or written as a string
        self._raw: list[str] = []  # everything read, until the call has started
        self.started = self.done = self.failed = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def push(self, text: str) -> int:
        """Read on; returns how much was read. Less than all: the object is done, or has failed."""
        for position, character in enumerate(text):
            if not self._read(character):
                self.failed = True
                return position
            if not self.started:
                self._raw.append(character)
            if self.done:
                return position + 1
        return len(text)

    def _read(self, character: str) -> bool:
        """Take one character in; False: this cannot be a call, or not go on as one."""
        at = self._at
        if at == _At.IN_VALUE:
            return self._read_value(character)
        if at == _At.IN_KEY:
            return self._read_key(character)
        if character in _SPACE:
            return True
        if at == _At.OPENING:
            self._at = _At.FIRST_KEY
            return character == "{"
        if at == _At.COLON:
            self._at = _At.VALUE
            return character == ":"
        if at == _At.VALUE:
            self._begin(_At.IN_VALUE)
            self._streams = character == "{" and self._key in _ARGUMENT_KEYS and bool(self._name)
            if self._streams and not self.started:
                self._start()
            return character not in ",}]:" and self._read_value(character)
        if character == "}" and at != _At.KEY:
            return self._close()
        if at == _At.AFTER_VALUE:
            self._at = _At.KEY
            return character == ","
        self._begin(_At.IN_KEY)
        return character == '"' and self._read_key(character)

    def _begin(self, at: _At) -> None:
        self._at, self._value, self._piece = at, JsonValue(), []

    def _read_key(self, character: str) -> bool:
        self._piece.append(character)
        self._value.feed(character)
        if not self._value.done:
            return True
        key = _string("".join(self._piece))
        self._key, self._at = key or "", _At.COLON
        return key is not None and (not self._bare or self.started or key in _CALL_KEYS)

    def _read_value(self, character: str) -> bool:
        taken = self._value.feed(character)
        if taken and self._streams:
            self._collector.arguments(character)
        elif taken:
            self._piece.append(character)
        if self._value.done:
            self._at = _At.AFTER_VALUE
            if not self._streams and not self._keep("".join(self._piece)):
                return False
        return taken or self._read(character)

    def _keep(self, value: str) -> bool:
        """A value that was not streamed is complete."""
        if self._key == "name" and not self.started:
            self._name = _string(value)
            known = not (self._bare and self._offered) or self._name in self._offered
            return bool(self._name) and known
        if self._key in _ARGUMENT_KEYS and not self.started:
            text = _string(value)  # some models write the arguments as a string of JSON
            self._arguments = "{}" if value == "null" else value if text is None else text
        return True

    def _close(self) -> bool:
        if not self.started:
            if self._name is None:
                return False
            self._start()
            self._collector.arguments("{}" if self._arguments is None else self._arguments)
        self.done = True
        return True

    def _start(self) -> None:
        assert self._name is not None
        self._collector.start(self._name)
        self.started, self._raw = True, []


def _string(text: str) -> str | None:
    """What a JSON string says; None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
