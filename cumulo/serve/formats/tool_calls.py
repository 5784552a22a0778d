"""Tool calls in an answer: which format a model was trained to write them in, and the parser that reads them.

hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>    (Hermes, Qwen)
llama3        {"name": "add", "parameters": {"a": 1}}; ...    the whole answer, or after <|python_tag|>
mistral       [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, ...]
mistral_args  [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]...    the newer form
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Any, Literal

from cumulo.models.text.tokenizer import Tokenizer
from cumulo.serve.formats.events import Collector, Event, mistral_call_id, partial_marker, random_call_id

ToolFormat = Literal["hermes", "llama3", "mistral", "mistral_args"]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_MARKER = "[TOOL_CALLS]"
# The first marker of each format stands before a call.
_MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": (HERMES_OPEN, HERMES_CLOSE),
    "llama3": (LLAMA_TAG,),
    "mistral": (MISTRAL_MARKER,),
    "mistral_args": (MISTRAL_MARKER, "[ARGS]", "[CALL_ID]"),
}


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """The format in which a model with this chat template was trained to call tools; None: in none we know."""
    if template is None:
        return None
    if HERMES_OPEN in template:
        return "hermes"
    if MISTRAL_MARKER in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if LLAMA_TAG in template or ("<|start_header_id|>" in template and "tools" in template):
        return "llama3"
    return None


def special_token(text: str, tokenizer: Tokenizer) -> int | None:
    """The special token that stands for this text, if there is one."""
    tokens = tokenizer.encode(text)
    return tokens[0] if len(tokens) == 1 and tokens[0] in tokenizer.special_ids else None


def hides_markers(tool_format: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Whether the format's markers are special tokens of this model: then the answer must be decoded with
    `skip_special_tokens=False`, or a parser sees none."""
    return any(special_token(marker, tokenizer) is not None for marker in _MARKERS[tool_format])


_STRING = r'"((?:[^"\\]|\\.)*)"'
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset(("name", "type", "id", *_ARGUMENT_KEYS))
# A call in the usual order, up to its arguments, which stream from there on.
_HEAD = re.compile(
    rf'\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)?"name"\s*:\s*{_STRING}\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_FIRST_KEY = re.compile(rf"\{{\s*{_STRING}(?:\s*:\s*{_STRING})?", re.DOTALL)
# What may follow the arguments within the object, and the characters that this can consist of.
_TAIL = re.compile(r'\s*(?:,\s*"\w*"\s*:\s*(?:"[\w .:+-]*"|[\w.+-]+)\s*)*')
_TAIL_CHARACTERS = re.compile(r'[\s\w",.:+-]*')
# Between the marker and the arguments of Mistral's newer form; anything longer is no call.
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*")
_NAMED_CHARACTERS = re.compile(r"[\w.\-\s\[\]]*")
_LONGEST_NAMED = 256


class ToolCallParser:
    """Reads an answer piece by piece. How it is cut into pieces does not matter. What turns out not to be a
    call comes as Text, complete; only white space next to a call is dropped."""

    def __init__(
        self,
        tool_format: ToolFormat,
        tool_names: Collection[str] = (),
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`tool_names`: the tools on offer. Where no marker stands before a call, JSON that names none of them is
        an answer; empty: any name will do."""
        self._marker = _MARKERS[tool_format][0]
        self._offered = frozenset(tool_names)
        default_id = mistral_call_id if self._marker == MISTRAL_MARKER else random_call_id
        self._collector = Collector(new_id or default_id)
        self._pending = ""
        self._opening = ""  # the marker and whatever else was read before the call that is being read
        self._end, self._scanned = _ObjectEnd(), 0
        self._bare = False  # no marker stands before the object that is being read
        self._has_tail = False  # the arguments that are being read stand in an object
        self._unclosed = False  # a call was read whose closing marker has not come yet
        # Each state takes what it can from the pending text; True: look again, False: more text is needed.
        self._state: Callable[[], bool] = self._between if tool_format == "llama3" else self._text

    def push(self, text: str) -> list[Event]:
        self._pending += text
        while self._state():
            pass
        return self._collector.drain()

    def finish(self) -> list[Event]:
        if self._state == self._object or self._opening.startswith(self._marker):
            self._collector.text(self._opening + self._pending)
        elif self._state != self._tail and not (self._unclosed and HERMES_CLOSE.startswith(self._pending)):
            self._collector.text(self._pending)
        self._pending = self._opening = ""
        self._collector.end()
        return self._collector.drain()

    # -- outside of calls ---------------------------------------------------------------------------------
    def _text(self) -> bool:
        markers = (self._marker, HERMES_CLOSE) if self._unclosed else (self._marker,)
        places = [(self._pending.find(marker), marker) for marker in markers if marker in self._pending]
        at, marker = min(places, default=(len(self._pending) - partial_marker(self._pending, *markers), ""))
        self._collector.text(self._pending[:at])
        self._pending = self._pending[at + len(marker) :]
        if marker:
            self._unclosed = False
        if marker == self._marker:
            self._opening, self._state = marker, self._opened
        return marker != ""

    def _between(self) -> bool:
        """Llama's calls have no marker: at the beginning of an answer and after a call, an object may be one."""
        rest = self._pending.lstrip().removeprefix(";").lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._begin_object(rest, bare=True)
        else:
            self._state = self._text
        return True

    # -- calls --------------------------------------------------------------------------------------------
    def _opened(self) -> bool:
        rest = self._pending.lstrip()
        if self._marker == MISTRAL_MARKER and not rest.startswith("["):
            return self._named()
        if not rest:
            return False
        if rest.startswith("[") and self._marker == MISTRAL_MARKER:
            self._opening += self._pending[: len(self._pending) - len(rest) + 1]
            self._pending, self._state = rest[1:], self._item
        elif rest.startswith("{"):
            self._begin_object(rest)
        else:
            self._give_up()
        return True

    def _named(self) -> bool:
        """A function's name and then its arguments, without an object around them."""
        head, brace, _ = self._pending.partition("{")
        found = _NAMED.fullmatch(head) if brace else None
        if found and len(head) <= _LONGEST_NAMED:
            self._pending = self._pending[len(head) :]
            self._start(found[1])
            return True
        if not brace and len(head) <= _LONGEST_NAMED and _NAMED_CHARACTERS.fullmatch(head):
            return False
        self._give_up()
        return True

    def _item(self) -> bool:
        """Read what stands before a call of a list, or its end."""
        rest = self._pending.lstrip()
        if rest.startswith("{"):
            self._begin_object(rest)
        elif rest:
            self._give_up()
        return rest != ""

    def _begin_object(self, rest: str, bare: bool = False) -> None:
        self._opening += self._pending[: len(self._pending) - len(rest)]
        self._pending, self._end, self._scanned = rest, _ObjectEnd(), 0
        self._bare, self._state = bare, self._object

    def _object(self) -> bool:
        if self._bare and self._is_other_json():
            self._give_up()
            return True
        if (found := _HEAD.match(self._pending)) and (name := _loaded(f'"{found[2]}"')):
            if self._is_offered(name):
                self._pending = self._pending[found.end() :]
                self._start(name)
            else:
                self._give_up()
            return True
        end = self._end.find(self._pending[self._scanned :])
        if end is None:
            self._scanned = len(self._pending)
            return False
        end += self._scanned
        call = _loaded(self._pending[:end])
        if not _is_call(call) or not self._is_offered(call["name"]):
            self._give_up(0 if self._bare else end)
            return True
        self._collector.start(call["name"])
        self._collector.arguments(_arguments_of(call))
        self._pending, self._opening = self._pending[end:], ""
        self._state = self._after
        return True

    def _is_offered(self, name: str) -> bool:
        return not (self._bare and self._offered) or name in self._offered

    def _is_other_json(self) -> bool:
        """An object without a marker must be told from a call, and soon: by its first key and its name."""
        found = _FIRST_KEY.match(self._pending)
        if found is None:
            begun = self._pending[1:].lstrip()
            return begun != "" and begun[0] != '"'
        key, value = found.groups()
        return key not in _CALL_KEYS or (key == "name" and value is not None and not self._is_offered(value))

    def _start(self, name: str) -> None:
        """A call has certainly begun: from here on its arguments, which come next, are passed on as written."""
        self._collector.start(name)
        self._has_tail = self._state == self._object
        self._opening, self._end = "", _ObjectEnd()
        self._state = self._arguments

    def _arguments(self) -> bool:
        end = self._end.find(self._pending)
        self._collector.arguments(self._pending[:end])
        self._pending = "" if end is None else self._pending[end:]
        if end is not None:
            self._state = self._tail if self._has_tail else self._text
        return end is not None

    def _tail(self) -> bool:
        """The rest of the object whose arguments have been read."""
        before, brace, after = self._pending.partition("}")
        if brace and _TAIL.fullmatch(before):
            self._pending, self._state = after, self._after
        elif not brace and _TAIL_CHARACTERS.fullmatch(before):
            return False
        else:
            self._unclosed, self._state = self._marker == HERMES_OPEN, self._text
        return True

    def _after(self) -> bool:
        """A call is complete."""
        if self._marker != MISTRAL_MARKER:
            self._unclosed = self._marker == HERMES_OPEN
            self._state = self._text if self._unclosed else self._between
            return True
        rest = self._pending.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._opening = self._pending[: len(self._pending) - len(rest) + 1]
            self._pending, self._state = rest[1:], self._item
        else:
            self._pending = rest[1:] if rest[0] == "]" else self._pending
            self._state = self._text
        return True

    def _give_up(self, characters: int = 0) -> None:
        """This is no call: what was read before it, and so many characters of it, are text."""
        self._collector.text(self._opening + self._pending[:characters])
        self._pending, self._opening = self._pending[characters:], ""
        self._state = self._text


class _ObjectEnd:
    """Finds where a JSON object ends, by its strings and brackets only."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """The place behind the object's end in this next piece of it; None: it ends later."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = character == "\\"
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"] != ""


def _arguments_of(call: dict[str, Any]) -> str:
    """Some models write the arguments as a string of JSON."""
    given = next((call[key] for key in _ARGUMENT_KEYS if key in call), None)
    if isinstance(given, str):
        return given
    return "{}" if given is None else json.dumps(given, ensure_ascii=False)
