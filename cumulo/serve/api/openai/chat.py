"""/v1/chat/completions: messages in, the assistant's answer out, whole or streamed.

The way of a request: the gate lets it in, BodyReader makes a ChatRequest of its body, `begin_chat` makes a prompt
of its messages and sends that to the engine as a Call, and Chats words what comes back. /v1/responses and
/v1/messages make a ChatRequest of theirs and go the same way from `begin_chat` on.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.outputs import Delta, Sample
from cumulo.serve.api.openai.answer_form import (
    AnswerForm,
    AnswerReader,
    ToolUse,
    answer_form,
    check_form,
    delta_of,
    message_of,
    tool_use,
)
from cumulo.serve.api.openai.conversation import (
    check_continued,
    conversation,
    template_variables,
    text_of,
)
from cumulo.serve.api.openai.events import (
    EventWriter,
    StreamCounts,
    event,
    json_response,
    open_stream,
    usage,
)
from cumulo.serve.api.openai.logprobs import chat_logprobs, prompt_logprobs, worded
from cumulo.serve.api.openai.sampling import (
    chat_params,
    check_tokens,
    default_limit,
    is_search,
    last_tokens,
)
from cumulo.serve.api.openai.schemas import ChatRequest
from cumulo.serve.api.openai.schemas_out import ERRORS, streamed
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.model_text import COUNTED_CONTEXTS
from cumulo.serve.service import Service

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/chat/completions", summary="Answer a conversation", responses=streamed("ChatCompletion"))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    call, form = await begin_chat(request, body, "chatcmpl-")
    answers = Chats(call, body, form)
    if body.stream:
        return await open_stream(call, answers)
    (finished,) = await call.results()
    asks_logprobs = body.logprobs or body.prompt_logprobs is not None
    return json_response(await worded(asks_logprobs, lambda: answers.whole(finished)))


async def begin_chat(
    request: Request, body: ChatRequest, prefix: str, guide_param: str | None = None
) -> tuple[Call, AnswerForm]:
    """Check a conversation, make its prompt and send it to the engine. `guide_param`: what the client calls
    `response_format`, where that is not its name.

    The call brings the answer and has the prompt's tokens (`prompts`); the form makes the readers that take an
    answer apart into thoughts, text and tool calls."""
    call = Call(request, prefix, body.model)
    service = call.service
    most_contexts = 1 if body.truncate_prompt_tokens is None else COUNTED_CONTEXTS
    use, prompt, tokens = await chat_prompt(service, body, most_contexts)
    max_tokens = body.max_completion_tokens or body.max_tokens
    tokens = last_tokens(body, tokens, service.info.max_context, max_tokens)
    form = answer_form(body, use, service.text, prompt)
    room = service.info.max_context - len(tokens)
    limit = default_limit(body, service.options.chat_limit, room)
    params = chat_params(body, service.info.generation_defaults, form.guide, form.show_special, limit)
    check_tokens((), params, service.info.vocab_size)
    call.default_limit = limit
    call.log("prompt", prompt)
    call.submit(
        [tokens],
        params,
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt,
        slo=body.slo.as_slo() if body.slo is not None else None,
        guide_param=guide_param or form.guide_param,
        session=body.prompt_cache_key or "",
    )
    return call, form


@contextlib.contextmanager
def telling_format_as(name: str) -> Iterator[None]:
    """Errors of a chat request that another API's request was turned into call `response_format` by its name
    there."""
    try:
        yield
    except ApiError as error:
        if error.param is not None and error.param.startswith("response_format"):
            error.param, error.message = name, error.message.replace("response_format", name)
        raise


async def chat_prompt(
    service: Service, body: ChatRequest, most_contexts: int = 1
) -> tuple[ToolUse | None, str, list[int]]:
    """Which tools the answer may call, and the prompt as text and as tokens."""
    use = tool_use(body)
    check_form(body.response_format)
    if body.continue_final_message:
        check_continued(body.messages, body.add_generation_prompt)
    elif body.echo:
        raise invalid("echo needs continue_final_message: there is no text to repeat", "echo")
    tools = use.shown if use is not None else []
    prompt, tokens = await service.text.encode_chat(
        conversation(body.messages, service.text.formats, tools),
        tools if service.text.formats.template_shows_tools else (),
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        variables=template_variables(body.chat_template_kwargs, body.reasoning_effort, service.text),
        continue_final_message=bool(body.continue_final_message),
        most_contexts=most_contexts,
    )
    return use, prompt, tokens


class Chats(EventWriter):
    """Words the answers of one request: whole, or as chunks while they are made."""

    def __init__(self, call: Call, body: ChatRequest, form: AnswerForm) -> None:
        self._call, self._body, self._form = call, body, form
        self._counts = StreamCounts(call, body)
        self._base: dict[str, Any] = {
            "id": call.id,
            "created": call.created,
            "model": call.model,
            "system_fingerprint": call.service.fingerprint,
        }
        if body.service_tier is not None:
            self._base["service_tier"] = "default"
        # What stands before each answer: the text that it continues.
        self._echoed = text_of(body.messages[-1].content) if body.echo else ""
        self._readers: dict[int, AnswerReader] = {}  # of the choices that have begun

    def whole(self, finished: Finished) -> dict[str, Any]:
        body, call = self._body, self._call
        answer: dict[str, Any] = {
            **self._base,
            "object": "chat.completion",
            "choices": [self._whole_choice(sample) for sample in finished.samples],
            "usage": usage([finished], searched=is_search(body)),
        }
        if body.prompt_logprobs is not None:
            of_prompt = finished.prompt_logprobs or []
            answer["prompt_logprobs"] = prompt_logprobs(call.service.text, of_prompt, body.prompt_logprobs)
        if body.return_token_ids:
            answer["prompt_token_ids"] = call.prompts[0]
        return answer

    def _whole_choice(self, sample: Sample) -> dict[str, Any]:
        reader = self._form.reader()
        message = message_of(reader.read(sample.text, last=True))
        if self._body.echo:
            message["content"] = self._echoed + (message["content"] or "")
        choice = {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs(sample),
            "finish_reason": reader.finish_reason(sample.finish_reason),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def add(self, batch: Batch) -> bytes:
        """Chunks of what is new; those that are new at the same time go in one piece."""
        chunks = [chunk for _, item in batch if isinstance(item, Delta) for chunk in self._chunks(item)]
        return b"".join(map(event, chunks))

    def end(self) -> bytes:
        return self._counts.end({**self._base, "object": "chat.completion.chunk"})

    def _chunks(self, item: Delta) -> list[dict[str, Any]]:
        self._counts.note(item)
        tells_prompt = not self._readers
        begins = item.index not in self._readers
        if begins:
            self._readers[item.index] = self._form.reader()
        reader = self._readers[item.index]
        deltas = [delta_of(piece) for piece in reader.read(item.text, last=item.finish_reason is not None)]
        logprobs = self._logprobs(item) if item.logprobs else None
        finish_reason = reader.finish_reason(item.finish_reason)
        if begins:
            repeated = [{"content": self._echoed}] if self._body.echo else []
            deltas = repeated + deltas
            deltas[:1] = [{"role": "assistant", "content": "", **(deltas[0] if deltas else {})}]
        ids = item.token_ids if self._body.return_token_ids else None
        if not deltas and (logprobs is not None or finish_reason is not None or ids):
            deltas = [{}]
        # None at all: the token's text is not certain yet.
        chunks = [self._chunk(item.index, delta) for delta in deltas]
        if chunks:  # the first has what belongs to the tokens, the last why the answer ends
            chunks[0]["choices"][0]["logprobs"] = logprobs
            chunks[-1]["choices"][0]["finish_reason"] = finish_reason
        if ids is not None and chunks:
            chunks[0]["choices"][0]["token_ids"] = ids
            if tells_prompt:
                chunks[0]["prompt_token_ids"] = self._call.prompts[0]
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._base, "object": "chat.completion.chunk", "choices": [choice], **self._counts.field()}

    def _logprobs(self, made: Sample | Delta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(
            self._call.service.text, self._call.spoken(made), self._call.params.logprobs or 0
        )
