"""MistralParser: tool calls as Mistral models write them, the older form and the newer one.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]...
"""

import re
from collections.abc import Callable, Collection

from cumulo.serve.formats.events import Collector, Event, mistral_call_id, partial_marker
from cumulo.serve.formats.json_call import JsonCall, JsonValue

MARKER = "[TOOL_CALLS]"
# Between the marker and the arguments of the newer form; anything longer is not a head.
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*")
_HEAD_CHARACTERS = re.compile(r"[\w.\-\s\[\]]*")
_LONGEST_HEAD = 256


class MistralParser:
    def __init__(self, tool_names: Collection[str] = (), new_id: Callable[[], str] = mistral_call_id) -> None:
        """`tool_names` is not needed here: whatever follows the marker is meant as a call."""
        self._collector = Collector(new_id)
        self._pending = ""
        self._call: JsonCall | None = None
        self._arguments = JsonValue()
        self._opening = ""  # what was read of a list before the call that is being read
        self._state: Callable[[], bool] = self._in_text

    def push(self, text: str) -> list[Event]:
        self._pending += text
        while self._state():
            pass
        return self._collector.drain()

    def finish(self) -> list[Event]:
        if self._state == self._in_head:
            self._collector.text(MARKER)
        elif self._call is not None and not self._call.started:
            self._collector.text(self._opening + self._call.raw)
        elif self._opening.startswith(MARKER):
            self._collector.text(self._opening)
        self._collector.text(self._pending)
        self._pending, self._call = "", None
        self._collector.end()
        return self._collector.drain()

    # Each state takes what it can from the pending text; True: look again, False: more text is needed.
    def _in_text(self) -> bool:
        before, marker, after = self._pending.partition(MARKER)
        if marker:
            self._collector.text(before)
            self._pending, self._state = after, self._in_head
            return True
        kept = len(self._pending) - partial_marker(self._pending, MARKER)
        self._collector.text(self._pending[:kept])
        self._pending = self._pending[kept:]
        return False

    def _in_head(self) -> bool:
        rest = self._pending.lstrip()
        if rest.startswith("["):
            self._opening = MARKER + self._pending[: len(self._pending) - len(rest) + 1]
            self._pending, self._state = rest[1:], self._in_list
            return True
        head, brace, _ = self._pending.partition("{")
        found = _HEAD.fullmatch(head) if brace else None
        if found and len(head) <= _LONGEST_HEAD:
            self._collector.start(found[1])
            self._pending, self._arguments = self._pending[len(head) :], JsonValue()
            self._state = self._in_arguments
            return True
        if not brace and len(head) <= _LONGEST_HEAD and _HEAD_CHARACTERS.fullmatch(head):
            return False
        self._collector.text(MARKER)
        self._state = self._in_text
        return True

    def _in_arguments(self) -> bool:
        for position, character in enumerate(self._pending):
            self._arguments.feed(character)
            if self._arguments.done:
                self._collector.arguments(self._pending[: position + 1])
                self._pending, self._state = self._pending[position + 1 :], self._in_text
                return True
        self._collector.arguments(self._pending)
        self._pending = ""
        return False

    def _in_list(self) -> bool:
        """Read what stands before a call of the list, or its end."""
        rest = self._pending.lstrip()
        if not rest:
            return False
        self._opening += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if rest[0] == "{":
            self._call, self._state = JsonCall(self._collector), self._in_call
        else:
            self._leave_list()
        return True

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        self._pending = self._pending[call.push(self._pending) :]
        if not (call.done or call.failed):
            return False
        self._opening = "" if call.started else self._opening + call.raw
        self._call = None
        if call.done:
            self._state = self._after_call
        else:
            self._leave_list()
        return True

    def _after_call(self) -> bool:
        rest = self._pending.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._opening = self._pending[: len(self._pending) - len(rest) + 1]
            self._pending, self._state = rest[1:], self._in_list
        else:
            if rest[0] == "]":
                self._pending = rest[1:]
            self._state = self._in_text
        return True

    def _leave_list(self) -> None:
        """This is no list of calls after all, or no longer one: what was read of it is text."""
        self._collector.text(self._opening)
        self._opening, self._state = "", self._in_text
