"""/v1/chat/completions: messages in, the assistant's answer out, whole or streamed."""

import logging
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.outputs import Delta
from cumulo.serve.call import Call
from cumulo.serve.descriptions import answers, streamed
from cumulo.serve.events import DONE, event, json_response, open_stream
from cumulo.serve.logprobs import chat_logprobs, spoken
from cumulo.serve.sampling import chat_params
from cumulo.serve.schemas import ChatRequest, Message
from cumulo.serve.schemas_out import ChatCompletion
from cumulo.serve.service import Service
from cumulo.serve.stories import explanation
from cumulo.serve.usage import usage

router = APIRouter()
log = logging.getLogger(__name__)


@router.post(
    "/v1/chat/completions", summary="Answer a conversation", responses=answers(streamed(ChatCompletion))
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)
    service.check_ready()
    params = chat_params(body, service.info.generation_defaults)
    prompt, tokens = await service.text.encode_chat(
        plain_messages(body.messages), add_generation_prompt=body.add_generation_prompt is not False
    )
    call = Call(service, request, "chatcmpl")
    if service.options.log_prompts:
        log.info("%s prompt: %r", call.id, prompt)
    call.submit(
        [tokens],
        params,
        stream=bool(body.stream),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    ends = frozenset((*service.info.eos_ids, *params.stop_token_ids))
    if body.stream:
        return await open_stream(call, _events(call, body, ends))
    return json_response(await _whole(call, body, ends))


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """As chat templates expect them: one text per message, and `system` for what newer models call developer."""
    plain = []
    for message in messages:
        content = message.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        entry = {"role": "system" if message.role == "developer" else message.role, "content": text}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    return plain


async def _whole(call: Call, body: ChatRequest, ends: frozenset[int]) -> dict[str, Any]:
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
        choices.append(
            {
                "index": sample.index,
                "message": {"role": "assistant", "content": sample.text, "refusal": None},
                "logprobs": logprobs,
                "finish_reason": sample.finish_reason,
            }
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


async def _events(call: Call, body: ChatRequest, ends: frozenset[int]) -> AsyncGenerator[bytes, None]:
    """Chunks as they come; those that are new at the same time in one piece."""
    service = call.service
    counts_wanted = body.stream_options is not None and body.stream_options.include_usage
    base: dict[str, Any] = {
        "id": call.id,
        "object": "chat.completion.chunk",
        "created": call.created,
        "model": service.model_name,
    }
    nothing_yet = {"usage": None} if counts_wanted else {}
    begun: set[int] = set()
    async for batch in call.news():
        pieces = []
        for _, item in batch:
            if not isinstance(item, Delta):
                continue
            delta: dict[str, Any] = {"content": item.text} if item.text else {}
            if item.index not in begun:
                begun.add(item.index)
                delta = {"role": "assistant", "content": item.text}
            logprobs = None
            if body.logprobs and item.logprobs:
                entries = spoken(item.logprobs, item.finish_reason, ends)
                logprobs = chat_logprobs(service.text, entries, body.top_logprobs or 0)
            if not delta and logprobs is None and item.finish_reason is None:
                continue  # the token's text is not certain yet
            choice = {
                "index": item.index, "delta": delta, "logprobs": logprobs, "finish_reason": item.finish_reason,
            }  # fmt: skip
            pieces.append(event({**base, "choices": [choice], **nothing_yet}))
        if pieces:
            yield b"".join(pieces)
    last: list[bytes] = []
    results = [finished for finished in call.finished if finished is not None]
    if service.options.log_prompts:
        for sample in results[0].samples:
            log.info("%s answer %d: %r", call.id, sample.index, sample.text)
    if body.explain:
        stories = [explanation(record) for record in service.stories.of_call(call.id)]
        last.append(event({**base, "choices": [], "explain": stories, **nothing_yet}))
    if counts_wanted:
        last.append(event({**base, "choices": [], "usage": usage(results)}))
    yield b"".join([*last, DONE])
