"""StoredResponses: the responses kept for `previous_response_id` and GET /v1/responses/{id}. Owned by the Service.

They live in memory, as JSON, until the server stops or newer ones need the room. A caller sees their own only, and
whoever keeps the most is the first to lose some: nobody can push out what others keep.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
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
        # By caller and id; the one that was used longest ago comes first.
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.size_bytes = 0

    @property
    def count(self) -> int:
        return len(self._kept)

    def put(self, caller: str, response_id: str, stored: StoredResponse) -> bool:
        """Whether it is kept: one that is too large is not."""
        if not self.most or stored.size_bytes > self._most_bytes_each:
            return False
        self._kept[caller, response_id] = stored
        self.size_bytes += stored.size_bytes
        while self.count > self.most:
            self._drop_one(lambda kept: 1)
        while self.size_bytes > self.most_bytes:
            self._drop_one(lambda kept: kept.size_bytes)
        return True

    def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """None: there is no such response, or it is somebody else's. What is used stays longest."""
        found = self._kept.get((caller, response_id))
        if found is not None:
            self._kept.move_to_end((caller, response_id))
        return found

    def delete(self, caller: str, response_id: str) -> bool:
        dropped = self._kept.pop((caller, response_id), None)
        self.size_bytes -= dropped.size_bytes if dropped is not None else 0
        return dropped is not None

    def _drop_one(self, weight: Callable[[StoredResponse], int]) -> None:
        """Drop the oldest response of the caller who keeps the most by this weight."""
        weights: Counter[str] = Counter()
        for (caller, _), stored in self._kept.items():
            weights[caller] += weight(stored)
        largest = max(weights, key=lambda caller: (weights[caller], caller))
        self.delete(*next(place for place in self._kept if place[0] == largest))


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
