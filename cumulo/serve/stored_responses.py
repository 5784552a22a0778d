"""StoredResponses: the responses kept for `previous_response_id` and GET /v1/responses/{id}. Owned by the Service.

They live in memory, as JSON, until the server stops or newer ones need the room. A caller sees their own only, and
whoever keeps the most is the first to lose some: nobody can push out what others keep.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.decode
MOST_BYTES = 64 << 20
MOST_BYTES_EACH = 8 << 20  # a conversation grows with every response that continues another


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Complete in itself, so that none is lost with another: the items include those of earlier responses."""

    response: bytes
    input_items: bytes  # everything the model was asked with, oldest first
    output_items: bytes  # without log-probabilities: they are no part of a conversation

    @classmethod
    def from_response(cls, response: dict[str, Any], input_items: list[dict[str, Any]]) -> "StoredResponse":
        output = [_without_logprobs(item) for item in response["output"]]
        return cls(_to_json(response), _to_json(input_items), _to_json(output))

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + len(self.output_items)

    def inputs(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = _from_json(self.input_items)
        return items

    def conversation(self) -> list[dict[str, Any]]:
        """What a response that continues this one begins with."""
        outputs: list[dict[str, Any]] = _from_json(self.output_items)
        return self.inputs() + outputs


class StoredResponses:
    def __init__(
        self, most: int, most_bytes: int = MOST_BYTES, most_bytes_each: int = MOST_BYTES_EACH
    ) -> None:
        """With `most` 0 nothing is kept."""
        self.most, self.most_bytes, self._most_bytes_each = most, most_bytes, min(most_bytes, most_bytes_each)
        self.count = self.size_bytes = 0
        self._by_caller: dict[str, _OfCaller] = {}  # by caller

    def put(self, caller: str, response_id: str, stored: StoredResponse) -> bool:
        """Whether it is kept: one that is too large is not."""
        if not self.most or stored.size_bytes > self._most_bytes_each:
            return False
        own = self._by_caller.setdefault(caller, _OfCaller())
        own.put(response_id, stored)
        self.count += 1
        self.size_bytes += stored.size_bytes
        while self.count > self.most:
            self._drop_oldest(max(self._by_caller, key=lambda name: (len(self._by_caller[name].kept), name)))
        while self.size_bytes > self.most_bytes:
            self._drop_oldest(max(self._by_caller, key=lambda name: (self._by_caller[name].size_bytes, name)))
        return True

    def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """None: there is no such response, or it is somebody else's. What is used stays longest."""
        own = self._by_caller.get(caller)
        if own is None or response_id not in own.kept:
            return None
        own.kept.move_to_end(response_id)
        return own.kept[response_id]

    def delete(self, caller: str, response_id: str) -> bool:
        own = self._by_caller.get(caller)
        if own is None or response_id not in own.kept:
            return False
        self._drop(caller, response_id)
        return True

    def _drop_oldest(self, caller: str) -> None:
        self._drop(caller, next(iter(self._by_caller[caller].kept)))

    def _drop(self, caller: str, response_id: str) -> None:
        own = self._by_caller[caller]
        dropped_bytes = own.drop(response_id)
        self.count -= 1
        self.size_bytes -= dropped_bytes
        if not own.kept:
            del self._by_caller[caller]


class _OfCaller:
    """One caller's responses, the one that was used longest ago first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size_bytes = 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        self.kept[response_id] = stored
        self.size_bytes += stored.size_bytes

    def drop(self, response_id: str) -> int:
        dropped_bytes = self.kept.pop(response_id).size_bytes
        self.size_bytes -= dropped_bytes
        return dropped_bytes


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
