"""Lists as OpenAI's API gives them: some at a time, the next after a given id. Used by files and batches."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cumulo.serve.errors import invalid

Item = TypeVar("Item")


def page(
    newest_first: Sequence[Item], as_json: Callable[[Item], dict[str, Any]], limit: int, after: str | None
) -> dict[str, Any]:
    entries = [as_json(item) for item in newest_first]
    start = 0
    if after is not None:
        places = {entry["id"]: place for place, entry in enumerate(entries)}
        if after not in places:
            raise invalid(f"there is no {after[:64]!r} in this list to go on after", "after", "invalid_value")
        start = places[after] + 1
    data = entries[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(entries),
    }
