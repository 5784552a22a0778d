"""/v1/chat/completions: messages in, the assistant's answer out, whole or streamed."""

import logging
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.outputs import Delta
from cumulo.engine.params import SamplingParams
from cumulo.serve.answer_form import AnswerForm, ToolUse, answer_form, check_form, tool_use
from cumulo.serve.answer_reader import AnswerReader, delta_of, message_of
from cumulo.serve.call import Batch, Call
from cumulo.serve.conversation import conversation
from cumulo.serve.descriptions import answers, streamed
from cumulo.serve.events import DONE, PreparedEvent, event, json_response, open_stream
from cumulo.serve.logprobs import chat_logprobs, spoken
from cumulo.serve.schemas import ChatRequest
from cumulo.serve.schemas_out import ChatCompletion
from cumulo.serve.service import Service
from cumulo.serve.stories import explanation
from cumulo.serve.usage import usage

router = APIRouter()
log = logging.getLogger(__name__)
_NOT_BEGUN = object()


@router.post(
    "/v1/chat/completions", summary="Answer a conversation", responses=answers(streamed(ChatCompletion))
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    call, form, params = await begin_chat(service, request, body, "chatcmpl-")
    ends = frozenset((*service.info.eos_ids, *params.stop_token_ids))
    if body.stream:
        return await open_stream(call, ChatEvents(call, body, form, ends))
    return json_response(await _whole(call, body, form, ends))


async def begin_chat(
    service: Service, request: Request, body: ChatRequest, prefix: str, guide_param: str | None = None
) -> tuple[Call, AnswerForm, SamplingParams]:
    """Check a conversation, make its prompt and send it to the engine. `guide_param`: what the client calls
    `response_format`, where that is not its name."""
    service.check_model(body.model)
    service.check_ready()
    use, prompt, tokens = await chat_prompt(service, body)
    form = answer_form(body, use, service.text, prompt)
    params = service.chat_params.of(body, service.info.generation_defaults, form.guide, form.show_special)
    call = Call(service, request, prefix)
    if service.options.log_prompts:
        log.info("%s prompt: %r", call.id, prompt)
    call.submit(
        [tokens],
        params,
        stream=bool(body.stream),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        guide_param=guide_param or form.guide_param,
    )
    return call, form, params


async def chat_prompt(service: Service, body: ChatRequest) -> tuple[ToolUse | None, str, list[int]]:
    """Which tools the answer may call, and the prompt as text and as tokens."""
    use = tool_use(body)
    check_form(body.response_format)
    tools = use.shown if use is not None else []
    prompt, tokens = await service.text.encode_chat(
        conversation(body.messages, service.text.formats, tools),
        tools if service.text.formats.template_shows_tools else (),
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    return use, prompt, tokens


async def _whole(call: Call, body: ChatRequest, form: AnswerForm, ends: frozenset[int]) -> dict[str, Any]:
    service = call.service
    results = await call.results()
    choices = []
    for sample in results[0].samples:
        if service.options.log_prompts:
            log.info("%s answer %d: %r", call.id, sample.index, sample.text)
        logprobs = None
        if body.logprobs:
            entries = spoken(sample.logprobs, sample.finish_reason, ends)
            logprobs = chat_logprobs(service.text, entries, body.top_logprobs or 0)
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        finish_reason: str | None = sample.finish_reason
        if (reader := form.reader()) is not None:
            message = message_of(reader.read(sample.text, last=True))
            finish_reason = reader.finish_reason(finish_reason)
        choices.append(
            {"index": sample.index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        )
    answer: dict[str, Any] = {
        "id": call.id,
        "object": "chat.completion",
        "created": call.created,
        "model": service.model_name,
        "choices": choices,
        "usage": usage(results),
    }
    if body.explain:
        answer["explain"] = [explanation(record) for record in service.stories.of_call(call.id)]
    return answer


class ChatEvents:
    """An answer as chunks; those that are new at the same time go in one piece."""

    def __init__(self, call: Call, body: ChatRequest, form: AnswerForm, ends: frozenset[int]) -> None:
        self._call, self._body, self._form, self._ends = call, body, form, ends
        self._counts_wanted = body.stream_options is not None and body.stream_options.include_usage
        self._base: dict[str, Any] = {
            "id": call.id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": call.service.model_name,
        }
        self._nothing_yet = {"usage": None} if self._counts_wanted else {}
        self._readers: dict[int, AnswerReader | None] = {}  # of the choices that have begun
        self._prepared: dict[int, PreparedEvent] = {}  # of those that are nothing but text

    def add(self, batch: Batch) -> bytes:
        pieces: list[bytes] = []
        for _, item in batch:
            if isinstance(item, Delta):
                if item.finish_reason is not None or not self._is_plain(item.index):
                    pieces += self._chunks(item)
                elif item.text:
                    pieces.append(self._prepared[item.index].with_text(item.text))
        return b"".join(pieces)

    def end(self) -> bytes:
        call, last = self._call, list[bytes]()
        results = [finished for finished in call.finished if finished is not None]
        if call.service.options.log_prompts:
            for sample in results[0].samples:
                log.info("%s answer %d: %r", call.id, sample.index, sample.text)
        if self._body.explain:
            stories = [explanation(record) for record in call.service.stories.of_call(call.id)]
            last.append(event({**self._base, "choices": [], "explain": stories, **self._nothing_yet}))
        if self._counts_wanted:
            last.append(event({**self._base, "choices": [], "usage": usage(results)}))
        return b"".join([*last, DONE])

    def _chunks(self, item: Delta) -> list[bytes]:
        logprobs = None
        if self._body.logprobs and item.logprobs:
            entries = spoken(item.logprobs, item.finish_reason, self._ends)
            logprobs = chat_logprobs(self._call.service.text, entries, self._body.top_logprobs or 0)
        begins = item.index not in self._readers
        if begins:
            self._readers[item.index] = self._form.reader()
        deltas, finish_reason = _read(item, self._readers[item.index])
        if begins:
            deltas[:1] = [{"role": "assistant", "content": "", **(deltas[0] if deltas else {})}]
        if not deltas and (logprobs is not None or finish_reason is not None):
            deltas = [{}]
        # None at all: the token's text is not certain yet.
        last = len(deltas) - 1
        return [
            event(
                self._chunk(
                    item.index,
                    delta,
                    logprobs if position == 0 else None,
                    finish_reason if position == last else None,
                )
            )
            for position, delta in enumerate(deltas)
        ]

    def _is_plain(self, index: int) -> bool:
        """Whether a choice that has begun is nothing but text; its event is prepared behind the first token."""
        if index in self._prepared:
            return True
        if self._body.logprobs or self._readers.get(index, _NOT_BEGUN) is not None:
            return False
        self._prepared[index] = PreparedEvent(self._chunk(index, {"content": PreparedEvent.MARK}))
        return True

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._base, "choices": [choice], **self._nothing_yet}


def _read(item: Delta, reader: AnswerReader | None) -> tuple[list[dict[str, Any]], str | None]:
    """What a piece of an answer adds to the client's message, and why the answer ends if it does."""
    if reader is None:
        return [{"content": item.text}] if item.text else [], item.finish_reason
    added = reader.read(item.text, last=item.finish_reason is not None)
    return [delta_of(piece) for piece in added], reader.finish_reason(item.finish_reason)
