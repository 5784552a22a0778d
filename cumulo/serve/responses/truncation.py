"""`truncation: "auto"`: drop the oldest items of a conversation that is longer than the context."""

from collections.abc import Sequence

from cumulo.errors import InvalidRequest
from cumulo.serve.openai.chat import chat_prompt
from cumulo.serve.responses.as_chat import make_chat
from cumulo.serve.responses.request import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputMessage,
    ResponsesRequest,
)
from cumulo.serve.service import Service


async def fitted(service: Service, body: ResponsesRequest, items: Sequence[InputItem]) -> Sequence[InputItem]:
    """As many of the newest items as fit, with room for the answer; the last one at least."""
    max_context = service.info.max_context
    room_tokens = max_context - min(body.max_output_tokens or 1, max_context // 2)

    async def fits(dropped: int) -> bool:
        try:
            _, _, tokens = await chat_prompt(service, await make_chat(body, without_oldest(items, dropped)))
        except InvalidRequest:  # too long to be tokenised at all
            return False
        return len(tokens) <= room_tokens

    if await fits(0):
        return items
    too_few, enough = (
        0,
        len(items) - 1,
    )  # how many to drop; the search takes log2 of the items, not all of them
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if await fits(middle):
            enough = middle
        else:
            too_few = middle
    return without_oldest(items, enough)


def without_oldest(items: Sequence[InputItem], dropped: int) -> list[InputItem]:
    """System messages stay, and no output stays without its call."""
    kept: list[InputItem] = []
    called: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, InputMessage) and item.role in ("system", "developer"):
            kept.append(item)
        elif index < dropped or (isinstance(item, FunctionCallOutputItem) and item.call_id not in called):
            continue
        else:
            kept.append(item)
            if isinstance(item, FunctionCallItem):
                called.add(item.call_id)
    return kept or [items[-1]]
