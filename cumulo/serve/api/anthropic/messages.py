"""/v1/messages: Anthropic's way to ask for an answer, whole or as events; /v1/messages/count_tokens."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.outputs import Delta
from cumulo.serve.api.anthropic.request import CountTokensRequest, MessagesRequest, as_chat, tool_use_id
from cumulo.serve.api.openai.answer_form import AnswerReader
from cumulo.serve.api.openai.chat import begin_chat, chat_prompt, telling_format_as
from cumulo.serve.api.openai.events import EventWriter, json_response, named_event, open_stream, usage
from cumulo.serve.api.openai.schemas_out import ANTHROPIC_ERRORS, answer, streamed
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.bodies.warnings import warn
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, anthropic_error
from cumulo.serve.formats.blocks import Block, BlockChange, Blocks
from cumulo.serve.formats.reasoning import Reasoning
from cumulo.serve.model_text import COUNTED_CONTEXTS
from cumulo.serve.service import service_of

Item = dict[str, Any]
Thoughts = Literal["shown", "omitted", "dropped"]
# Anthropic's servers sign thoughts and check them when they come back; nothing here depends on them being genuine.
_SIGNATURE = "not-signed"


class MessageAnswer:
    """The whole answer and the streamed one are made by the same calls; a whole one leaves the events alone."""

    def __init__(self, reader: AnswerReader, thoughts: Thoughts) -> None:
        self._reader, self._thoughts = reader, thoughts
        self._blocks = Blocks()

    def add(self, text: str, last: bool) -> list[Item]:
        pieces = self._reader.read(text, last)
        if self._thoughts == "dropped":
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        changes = self._blocks.add(pieces) + (self._blocks.close() if last else [])
        return [event for change in changes for event in self._events(change)]

    def content(self) -> list[Item]:
        return [self._whole(block) for block in self._blocks.blocks]

    def stop(self, finished: Finished) -> Item:
        """Why the answer ended, in this API's words."""
        sample = finished.samples[0]
        if sample.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(sample.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
        called = any(block.kind == "call" for block in self._blocks.blocks)
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    # -- spelling -----------------------------------------------------------------------------------------
    def _events(self, change: BlockChange) -> list[Item]:
        place = {"index": change.block.index}
        if change.what == "begun":
            begun = {"type": "content_block_start", **place, "content_block": _empty(change.block)}
            # Proxies and clients look for one; OpenAI's API has none.
            return [begun, {"type": "ping"}] if change.block.index == 0 else [begun]
        delta = {"type": "content_block_delta", **place}
        if change.what == "grown":
            if change.block.kind == "thoughts" and self._thoughts == "omitted":
                return []
            return [{**delta, "delta": _delta(change)}]
        stop = {"type": "content_block_stop", **place}
        if change.block.kind != "thoughts":
            return [stop]
        return [{**delta, "delta": {"type": "signature_delta", "signature": _SIGNATURE}}, stop]

    def _whole(self, block: Block) -> Item:
        if block.kind == "text":
            return {**_empty(block), "text": block.text}
        if block.kind == "call":
            return {**_empty(block), "input": block.arguments()}
        shown = block.text if self._thoughts == "shown" else ""
        return {**_empty(block), "thinking": shown, "signature": _SIGNATURE}


def _empty(block: Block) -> Item:
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "thoughts":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": tool_use_id(block.call_id), "name": block.name, "input": {}}


def _delta(change: BlockChange) -> Item:
    if change.block.kind == "text":
        return {"type": "text_delta", "text": change.text}
    if change.block.kind == "thoughts":
        return {"type": "thinking_delta", "thinking": change.text}
    return {"type": "input_json_delta", "partial_json": change.text}


def counts(finished: Finished) -> Item:
    """Token counts; cached tokens are not among the input tokens here."""
    counted = usage([finished])
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return _counts(counted["prompt_tokens"] - cached, cached, counted["completion_tokens"])


def _counts(input_tokens: int, cached: int = 0, output: int = 0) -> Item:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


router = APIRouter(route_class=JsonRoute, responses=ANTHROPIC_ERRORS)


@router.post(
    "/v1/messages", summary="Answer messages, in Anthropic's API", responses=streamed("AnthropicMessage")
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    with telling_format_as("output_config.format"):
        call, form = await begin_chat(request, await asyncio.to_thread(as_chat, body), "msg_")
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        warn("thinking.budget_tokens is not enforced; max_tokens bounds thoughts and answer together")
    answer = MessageAnswer(form.reader(), _thoughts(body))
    if body.stream:
        return await open_stream(call, MessageEvents(call, answer))
    results = await call.results()
    answer.add(results[0].samples[0].text, last=True)
    return json_response(_message(call, answer.content(), counts(results[0])) | answer.stop(results[0]))


@router.post(
    "/v1/messages/count_tokens",
    summary="How many tokens a request of /v1/messages has",
    responses=answer("TokenCount"),
)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    with telling_format_as("output_config.format"):
        _, _, tokens = await chat_prompt(service, await asyncio.to_thread(as_chat, body), COUNTED_CONTEXTS)
    return json_response({"input_tokens": len(tokens)})


def _thoughts(body: MessagesRequest) -> Thoughts:
    if body.thinking is None:
        return "shown"
    if body.thinking.type == "disabled":
        return "dropped"
    return "omitted" if body.thinking.display == "omitted" else "shown"


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


class MessageEvents(EventWriter):
    """The answer as named events, in the order that Anthropic's clients expect."""

    def __init__(self, call: Call, answer: MessageAnswer) -> None:
        self._call, self._answer = call, answer
        self._begun = False

    def add(self, batch: Batch) -> bytes:
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            # How much of the prompt was cached is known at the end, and told there.
            counted = _counts(sum(map(len, self._call.prompts)))
            events.append({"type": "message_start", "message": _message(self._call, [], counted)})
        for _, item in batch:
            if isinstance(item, Delta):
                events += self._answer.add(item.text, last=item.finish_reason is not None)
        return b"".join(map(named_event, events))

    def end(self) -> bytes:
        (finished,) = self._call.ended
        last = {"type": "message_delta", "delta": self._answer.stop(finished), "usage": counts(finished)}
        return named_event(last) + named_event({"type": "message_stop"})

    def fail(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error.status, error.message, self._call.id) + b"\n\n"
