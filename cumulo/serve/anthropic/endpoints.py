"""/v1/messages: Anthropic's way to ask for an answer, whole or streamed; /v1/messages/count_tokens."""

import logging
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.outputs import Delta
from cumulo.serve.anthropic.answer import MessageAnswer, Thoughts, counts
from cumulo.serve.anthropic.as_chat import make_chat, translated
from cumulo.serve.anthropic.request import CountTokensRequest, MessagesRequest
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.bodies.warnings import warn
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, anthropic_error
from cumulo.serve.openai.chat import begin_chat, chat_prompt
from cumulo.serve.openai.descriptions import anthropic_answers, plain, streamed
from cumulo.serve.openai.events import json_response, open_stream, to_line
from cumulo.serve.openai.schemas_out import AnthropicMessage, TokenCount
from cumulo.serve.service import Service

router = APIRouter(route_class=JsonRoute)
log = logging.getLogger(__name__)


@router.post(
    "/v1/messages",
    summary="Answer messages, in Anthropic's API",
    responses=anthropic_answers(streamed(AnthropicMessage)),
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    try:
        call, form, _ = await begin_chat(service, request, await make_chat(body), "msg_")
    except ApiError as error:
        raise translated(error) from None
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        warn("thinking.budget_tokens is not enforced; max_tokens bounds thoughts and answer together")
    answer = MessageAnswer(form.reader(), _thoughts(body))
    if body.stream:
        return await open_stream(call, MessageEvents(call, answer))
    results = await call.results()
    answer.add(results[0].samples[0].text, last=True)
    _note(call, results[0])
    return json_response(_message(call, answer.content(), counts(results[0])) | answer.stop(results[0]))


@router.post(
    "/v1/messages/count_tokens",
    summary="How many tokens a request of /v1/messages has",
    responses=anthropic_answers(plain(TokenCount, "The prompt's tokens, tools and system included.")),
)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)
    try:
        _, _, tokens = await chat_prompt(service, await make_chat(body))
    except ApiError as error:
        raise translated(error) from None
    return json_response({"input_tokens": len(tokens)})


def _thoughts(body: MessagesRequest) -> Thoughts:
    if body.thinking is None:
        return "shown"
    if body.thinking.type == "disabled":
        return "dropped"
    return "omitted" if body.thinking.display == "omitted" else "shown"


def _note(call: Call, finished: Finished) -> None:
    if call.service.options.log_prompts:
        log.info("%s answer: %r", call.id, finished.samples[0].text)


def _message(call: Call, content: list[Any], counted: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": counted,
    }


class MessageEvents:
    """The answer as named events, in the order that Anthropic's clients expect."""

    def __init__(self, call: Call, answer: MessageAnswer) -> None:
        self._call, self._answer = call, answer
        self._begun = False

    def add(self, batch: Batch) -> bytes:
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            # How much of the prompt was cached is known at the end, and told there.
            counted = {
                "input_tokens": sum(len(prompt) for prompt in self._call.prompts),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            }
            events.append({"type": "message_start", "message": _message(self._call, [], counted)})
        for _, item in batch:
            if isinstance(item, Delta):
                events += self._answer.add(item.text, last=item.finish_reason is not None)
        return _packed(events)

    def end(self) -> bytes:
        finished = self._call.finished[0]
        assert finished is not None  # EventStream: the call is complete
        _note(self._call, finished)
        last = {"type": "message_delta", "delta": self._answer.stop(finished), "usage": counts(finished)}
        return _packed([last, {"type": "message_stop"}])

    def fail(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error.status, error.message, self._call.id) + b"\n\n"


def _packed(events: list[dict[str, Any]]) -> bytes:
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + to_line(event) + b"\n\n" for event in events
    )
