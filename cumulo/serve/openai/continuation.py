"""`continue_final_message`: a prompt that ends inside the last message, so that the model goes on writing it.
Used by ModelText when it renders a conversation.

A template closes every message with its end-of-turn tokens. A mark is put at the end of the last message before
the template runs, and what the template writes is cut there, as transformers' `continue_final_message` does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cumulo.errors import InvalidRequest

_MARK = "cumulo-continues-this-message-here"
# Behind the mark stands a space: where that is gone, the template trims contents, and the text's end goes likewise.
_MARK_AND_SPACE = f"{_MARK} "


def with_open_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    *earlier, last = messages
    return [*earlier, {**last, "content": (last.get("content") or "") + _MARK_AND_SPACE}]


def up_to_open_end(rendered: str) -> str:
    place = rendered.rfind(_MARK)
    if place < 0:
        raise InvalidRequest(
            "continue_final_message: the model's chat template does not write the last message's content, so it "
            "cannot be continued; leave continue_final_message out"
        )
    kept = rendered[:place]
    return kept if rendered.startswith(_MARK_AND_SPACE, place) else kept.rstrip()
