"""Llama3Parser: tool calls as Llama 3.1 and later write them.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

The answer is the call: JSON from its first character, or after `<|python_tag|>`. Several are separated by
semicolons or white space. JSON that names no tool on offer is an answer, not a call.
"""

from collections.abc import Callable, Collection

from cumulo.serve.formats.events import Collector, Event, partial_marker, random_call_id
from cumulo.serve.formats.json_call import JsonCall

TAG = "<|python_tag|>"


class Llama3Parser:
    def __init__(self, tool_names: Collection[str] = (), new_id: Callable[[], str] = random_call_id) -> None:
        """`tool_names`: the tools on offer; empty: any name will do."""
        self._offered = frozenset(tool_names)
        self._collector = Collector(new_id)
        self._pending = ""
        self._call: JsonCall | None = None
        self._opening = ""  # what stood before the call that is being read
        self._state: Callable[[], bool] = self._at_start

    def push(self, text: str) -> list[Event]:
        self._pending += text
        while self._state():
            pass
        return self._collector.drain()

    def finish(self) -> list[Event]:
        if self._call is not None and not self._call.started:
            self._collector.text(self._opening + self._call.raw)
        self._collector.text(self._pending)
        self._pending, self._call = "", None
        self._collector.end()
        return self._collector.drain()

    # Each state takes what it can from the pending text; True: look again, False: more text is needed.
    def _at_start(self) -> bool:
        return self._call_or_text(self._pending.lstrip())

    def _between(self) -> bool:
        rest = self._pending.lstrip()
        if rest.startswith(";"):
            rest = rest[1:].lstrip()
        return self._call_or_text(rest)

    def _call_or_text(self, rest: str) -> bool:
        """`rest` is the pending text without what may stand before a call."""
        if not rest:
            return False
        if rest.startswith("{"):
            self._begin(self._pending[: len(self._pending) - len(rest)], rest)
        else:
            self._state = self._in_text
        return True

    def _begin(self, opening: str, rest: str) -> None:
        self._opening, self._pending = opening, rest
        self._state = self._in_call
        self._call = JsonCall(self._collector, bare=opening != TAG, offered=self._offered)

    def _in_text(self) -> bool:
        before, marker, after = self._pending.partition(TAG)
        if marker:
            self._collector.text(before)
            self._begin(TAG, after)
            return True
        kept = len(self._pending) - partial_marker(self._pending, TAG)
        self._collector.text(self._pending[:kept])
        self._pending = self._pending[kept:]
        return False

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        self._pending = self._pending[call.push(self._pending) :]
        if not (call.done or call.failed):
            return False
        if call.failed and not call.started:
            self._collector.text(self._opening + call.raw)
        self._call, self._state = None, self._between if call.done else self._in_text
        return True
