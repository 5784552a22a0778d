"""The routes of /v1/responses: make a response, read it again, delete it, list what it was asked with."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cumulo.engine.outputs import Delta
from cumulo.errors import InvalidRequest
from cumulo.serve.access.keys import caller_of
from cumulo.serve.api.openai.chat import begin_chat, chat_prompt, telling_format_as
from cumulo.serve.api.openai.events import EventWriter, json_response, named_event, open_stream, page
from cumulo.serve.api.openai.schemas_out import ERRORS, answer, streamed
from cumulo.serve.api.responses.items import Item, Output, TextLogprobs, response_object, spelled_inputs
from cumulo.serve.api.responses.request import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputMessage,
    ResponsesRequest,
    as_chat,
    input_items,
)
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.service import Service, service_of
from cumulo.serve.stored_responses import StoredResponse

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/responses", summary="Answer an input", responses=streamed("ResponseObject"))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """The response is kept in memory unless `store` is false: `previous_response_id` continues it."""
    call, answer = await _ask(body, request)
    if body.stream:
        return await open_stream(call, answer)
    return json_response(answer.whole(await call.results()))


async def _ask(body: ResponsesRequest, request: Request) -> "tuple[Call, Responses]":
    service = service_of(request)
    if body.store and not service.stored_responses.most:
        raise invalid("this server keeps no responses (--stored-responses 0): send store: false", "store")
    stored = None
    if body.previous_response_id is not None:
        stored = _stored(request, body.previous_response_id, "previous_response_id")
    service.check_model(body.model)
    service.check_ready()
    items, spelled = await asyncio.to_thread(_conversation, body, stored)
    if body.truncation == "auto":
        # What is dropped is not kept either: a conversation that is cut does not grow for ever.
        kept = {id(item) for item in await fitted(service, body, items)}
        spelled = [one for item, one in zip(items, spelled, strict=True) if id(item) in kept]
        items = [item for item in items if id(item) in kept]
    formed = body.text is not None and body.text.format is not None and body.text.format.type != "text"
    with telling_format_as("text.format"):
        chat = await asyncio.to_thread(as_chat, body, items)
        call, form = await begin_chat(request, chat, "resp_", "text.format" if formed else None)
    logprobs = TextLogprobs(service.text, body.top_logprobs or 0) if body.wants_logprobs else None
    return call, Responses(call, body, Output(call.id, form.reader(), logprobs), spelled)


def _conversation(
    body: ResponsesRequest, stored: StoredResponse | None
) -> tuple[list[InputItem], list[Item]]:
    """What the model is asked with, oldest first: to be read, and as it is kept."""
    earlier = stored.conversation() if stored is not None else []
    own: list[InputItem] = (
        [InputMessage.model_validate({"role": "user", "content": body.input})]
        if isinstance(body.input, str)
        else body.input
    )
    return [*input_items.validate_python(earlier), *own], [*earlier, *spelled_inputs(own)]


class Responses(EventWriter):
    """Words the response to one request: whole, or as numbered events that say what is added to which item, and the
    whole response before and after. It is kept at its end."""

    def __init__(self, call: Call, body: ResponsesRequest, output: Output, inputs: list[Item]) -> None:
        self._call, self._body, self._output, self._inputs = call, body, output, inputs
        self._number = 0

    def whole(self, results: list[Finished]) -> Item:
        sample = results[0].samples[0]
        self._output.add(sample.text, True, self._call.spoken(sample))
        self._output.close(sample.finish_reason)
        return self._finish(results)

    def _finish(self, results: list[Finished]) -> Item:
        response = response_object(self._call, self._body, self._output, results)
        if response["store"]:
            kept = StoredResponse.from_response(response, self._inputs)
            stored_responses = self._call.service.stored_responses
            response["store"] = stored_responses.put(self._call.caller.name, self._call.id, kept)
        return response

    def add(self, batch: Batch) -> bytes:
        events: list[Item] = []
        if not self._number:
            begun = response_object(self._call, self._body, self._output, [])
            events += [
                {"type": kind, "response": begun} for kind in ("response.created", "response.in_progress")
            ]
        for _, item in batch:
            if isinstance(item, Delta):
                spoken = self._call.spoken(item)
                events += self._output.add(item.text, item.finish_reason is not None, spoken)
                if item.finish_reason is not None:
                    events += self._output.close(item.finish_reason)
        return self._packed(events)

    def end(self) -> bytes:
        response = self._finish(self._call.ended)
        return self._packed([{"type": f"response.{response['status']}", "response": response}])

    def fail(self, error: ApiError) -> bytes:
        response = response_object(self._call, self._body, self._output, [], error)
        return self._packed([{"type": "response.failed", "response": response}])

    def _packed(self, events: list[Item]) -> bytes:
        first, self._number = self._number, self._number + len(events)
        numbered = [{**content, "sequence_number": number} for number, content in enumerate(events, first)]
        return b"".join(map(named_event, numbered))


# -- a conversation that is longer than the context -------------------------------------------------------
async def fitted(service: Service, body: ResponsesRequest, items: Sequence[InputItem]) -> Sequence[InputItem]:
    """As many of the newest items as fit, with room for the answer; the last one at least."""
    max_context = service.info.max_context
    room_tokens = max_context - min(body.max_output_tokens or 1, max_context // 2)

    async def fits(dropped: int) -> bool:
        chat = await asyncio.to_thread(as_chat, body, without_oldest(items, dropped))
        try:
            _, _, tokens = await chat_prompt(service, chat)
        except InvalidRequest:  # too long to be tokenised at all
            return False
        return len(tokens) <= room_tokens

    if await fits(0):
        return items
    # How many to drop; the search takes log2 of the items, not all of them.
    too_few, enough = 0, len(items) - 1
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


# -- what was stored --------------------------------------------------------------------------------------
def _stored(request: Request, response_id: str, param: str | None = None) -> StoredResponse:
    kept = request.app.state.service.stored_responses
    stored: StoredResponse | None = kept.get(caller_of(request).name, response_id)
    if stored is not None:
        return stored
    why = (
        f"the server keeps the newest {kept.most:,}, in memory, until it stops; one made with store: false or with "
        "another API key is not found either"
        if kept.most
        else "the server keeps none (--stored-responses 0)"
    )
    message = f"there is no response {response_id[:80]!r} here: {why}. Send the earlier items again instead"
    raise ApiError(404, message, param=param, code="response_not_found")


@router.get("/v1/responses/{response_id}", summary="A stored response", responses=answer("ResponseObject"))
async def get_response(
    response_id: str,
    request: Request,
    stream: Annotated[bool, Query(description="Not supported: true is refused.")] = False,
) -> Response:
    if stream:
        raise invalid(
            "a stored response is given whole, not streamed again; leave stream out",
            "stream",
            "invalid_value",
        )
    return Response(_stored(request, response_id).response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", summary="Delete a stored response", responses=answer("Deleted"))
async def delete_response(response_id: str, request: Request) -> Response:
    _stored(request, response_id)
    request.app.state.service.stored_responses.delete(caller_of(request).name, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="What a stored response was asked with",
    responses=answer("ItemPage"),
)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100, description="How many items.")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="asc: oldest first.")] = "desc",
    after: Annotated[str | None, Query(description="Begin behind the item of this id.")] = None,
) -> Response:
    items = _stored(request, response_id).inputs()
    if order == "desc":
        items.reverse()
    return json_response(page(items, limit, after))
