"""/v1/completions: one text or many continued, as texts or as tokens."""

import logging
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.outputs import Delta, Sample
from cumulo.serve.call import Batch, Call
from cumulo.serve.descriptions import answers, streamed
from cumulo.serve.errors import invalid
from cumulo.serve.events import DONE, PreparedEvent, event, json_response, open_stream
from cumulo.serve.logprobs import CompletionColumns, spoken
from cumulo.serve.messages import Finished
from cumulo.serve.sampling import completion_params
from cumulo.serve.schemas import CompletionRequest
from cumulo.serve.schemas_out import Completion
from cumulo.serve.service import Service
from cumulo.serve.stories import explanation
from cumulo.serve.usage import usage

router = APIRouter()
log = logging.getLogger(__name__)


@router.post("/v1/completions", summary="Continue a text", responses=answers(streamed(Completion)))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)
    service.check_ready()
    if body.echo and (body.stream or body.best_of is not None):
        raise invalid("echo cannot be combined with stream or best_of", "echo")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens: 0 asks for nothing unless echo is true", "max_tokens")
    params = completion_params(body, service.info.generation_defaults)
    prompts = await _tokens(body, service)
    call = Call(service, request, "cmpl-")
    if service.options.log_prompts:
        log.info("%s prompt: %r", call.id, body.prompt)
    call.submit(
        prompts,
        params,
        stream=bool(body.stream),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    ends = frozenset((*service.info.eos_ids, *params.stop_token_ids))
    if body.stream:
        return await open_stream(call, CompletionEvents(call, body, ends))
    return json_response(await _whole(call, body, prompts, ends))


async def _tokens(body: CompletionRequest, service: Service) -> list[list[int]]:
    given = body.prompt
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    prompts: list[list[int]] = []
    for prompt in several:
        tokens = await service.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise invalid("the prompt is empty: there is nothing to continue", "prompt")
        prompts.append(tokens)
    return prompts


async def _whole(
    call: Call, body: CompletionRequest, prompts: list[list[int]], ends: frozenset[int]
) -> dict[str, Any]:
    service = call.service
    results = await call.results()
    choices = []
    for position, finished in enumerate(results):
        for sample in finished.samples:
            if service.options.log_prompts:
                log.info("%s answer %d.%d: %r", call.id, position, sample.index, sample.text)
            choices.append(_choice(body, service, prompts[position], position, finished, sample, ends))
    answer: dict[str, Any] = {
        "id": call.id,
        "object": "text_completion",
        "created": call.created,
        "model": service.model_name,
        "choices": choices,
        "usage": usage(results, dropped_tokens=len(choices) if body.max_tokens == 0 else 0),
    }
    if body.explain:
        answer["explain"] = [explanation(record) for record in service.stories.of_call(call.id)]
    return answer


def _choice(
    body: CompletionRequest,
    service: Service,
    prompt: list[int],
    position: int,
    finished: Finished,
    sample: Sample,
    ends: frozenset[int],
) -> dict[str, Any]:
    text, entries, finish_reason = sample.text, sample.logprobs, sample.finish_reason
    if body.max_tokens == 0:  # the engine draws at least one token; it was not asked for
        text, entries, finish_reason = "", [], "length"
    logprobs = None
    if body.logprobs is not None:
        columns = CompletionColumns(service.text, body.logprobs)
        shown = spoken(entries, finish_reason, ends)
        if body.echo:
            logprobs = columns.add([*(finished.prompt_logprobs or []), *shown], first_token=prompt[0])
        else:
            logprobs = columns.add(shown)
    if body.echo:
        text = service.text.tokenizer.decode(prompt) + text
    return {
        "index": position * (body.n or 1) + sample.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


class CompletionEvents:
    """Answers as chunks; those that are new at the same time go in one piece."""

    def __init__(self, call: Call, body: CompletionRequest, ends: frozenset[int]) -> None:
        self._call, self._body, self._ends = call, body, ends
        self._samples = body.n or 1
        self._counts_wanted = body.stream_options is not None and body.stream_options.include_usage
        self._base: dict[str, Any] = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.service.model_name,
        }
        self._nothing_yet = {"usage": None} if self._counts_wanted else {}
        self._columns: dict[int, CompletionColumns] = {}
        self._prepared: dict[int, PreparedEvent] = {}  # of the choices that have begun, without logprobs

    def add(self, batch: Batch) -> bytes:
        pieces: list[bytes] = []
        for position, item in batch:
            if not isinstance(item, Delta):
                continue
            index = position * self._samples + item.index
            if item.finish_reason is not None or self._body.logprobs is not None:
                pieces += self._chunk(index, item)
            elif item.text:
                pieces.append(self._prepared_event(index, item).with_text(item.text))
        return b"".join(pieces)

    def end(self) -> bytes:
        call, last = self._call, list[bytes]()
        if self._body.explain:
            stories = [explanation(record) for record in call.service.stories.of_call(call.id)]
            last.append(event({**self._base, "choices": [], "explain": stories, **self._nothing_yet}))
        if self._counts_wanted:
            finished = [result for result in call.finished if result is not None]
            last.append(event({**self._base, "choices": [], "usage": usage(finished)}))
        return b"".join([*last, DONE])

    def _chunk(self, index: int, item: Delta) -> list[bytes]:
        wanted, logprobs = self._body.logprobs, None
        if wanted is not None and item.logprobs:
            column = self._columns.setdefault(index, CompletionColumns(self._call.service.text, wanted))
            logprobs = column.add(spoken(item.logprobs, item.finish_reason, self._ends))
        if not item.text and logprobs is None and item.finish_reason is None:
            return []  # the token's text is not certain yet
        return [event(self._content(index, item, logprobs))]

    def _prepared_event(self, index: int, item: Delta) -> PreparedEvent:
        if index not in self._prepared:
            mark = Delta(item.request_id, item.index, PreparedEvent.MARK, [])
            self._prepared[index] = PreparedEvent(self._content(index, mark, None))
        return self._prepared[index]

    def _content(self, index: int, item: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice = {
            "index": index, "text": item.text, "logprobs": logprobs, "finish_reason": item.finish_reason,
        }  # fmt: skip
        return {**self._base, "choices": [choice], **self._nothing_yet}
