"""HermesParser: tool calls as Hermes and Qwen models write them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Several calls follow one another; text may stand before and between them.
"""

from collections.abc import Callable, Collection

from cumulo.serve.formats.events import Collector, Event, partial_marker, random_call_id
from cumulo.serve.formats.json_call import JsonCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    def __init__(self, tool_names: Collection[str] = (), new_id: Callable[[], str] = random_call_id) -> None:
        """`tool_names` is not needed here: whatever stands between the markers is meant as a call."""
        self._collector = Collector(new_id)
        self._pending = ""
        self._call: JsonCall | None = None
        self._unclosed = False  # a call was read whose closing marker has not come yet

    def push(self, text: str) -> list[Event]:
        self._pending += text
        while self._read_text() if self._call is None else self._read_call(self._call):
            pass
        return self._collector.drain()

    def finish(self) -> list[Event]:
        if self._call is not None and not self._call.started:
            self._collector.text(OPEN + self._call.raw)
        if not (self._unclosed and CLOSE.startswith(self._pending)):
            self._collector.text(self._pending)
        self._pending, self._call = "", None
        self._collector.end()
        return self._collector.drain()

    # Both take what they can from the pending text; True: look again, False: more text is needed.
    def _read_text(self) -> bool:
        markers = (OPEN, CLOSE) if self._unclosed else (OPEN,)
        at, marker = min(((self._pending.find(marker), marker) for marker in markers), key=_first)
        if at < 0:
            at = len(self._pending) - partial_marker(self._pending, *markers)
            marker = ""
        self._collector.text(self._pending[:at])
        self._pending = self._pending[at + len(marker) :]
        if marker:
            self._unclosed = False
            self._call = JsonCall(self._collector) if marker == OPEN else None
        return marker != ""

    def _read_call(self, call: JsonCall) -> bool:
        self._pending = self._pending[call.push(self._pending) :]
        if not (call.done or call.failed):
            return False
        if not call.started:
            self._collector.text(OPEN + call.raw)
        self._unclosed, self._call = call.started, None
        return True


def _first(found: tuple[int, str]) -> float:
    """Orders what was found by its place, and what was not found last."""
    return found[0] if found[0] >= 0 else float("inf")
