"""/v1/completions: one text or many continued, as texts or as tokens."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.outputs import Delta, Sample
from cumulo.serve.api.openai.answer_form import check_form, guide_of
from cumulo.serve.api.openai.events import (
    EventWriter,
    StreamCounts,
    event,
    json_response,
    open_stream,
    usage,
)
from cumulo.serve.api.openai.logprobs import (
    CompletionColumns,
    echoed_columns,
    joined_columns,
    prompt_logprobs,
    worded,
)
from cumulo.serve.api.openai.sampling import check_tokens, completion_params, is_search, last_tokens
from cumulo.serve.api.openai.schemas import CompletionRequest
from cumulo.serve.api.openai.schemas_out import ERRORS, streamed
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import invalid
from cumulo.serve.model_text import COUNTED_CONTEXTS
from cumulo.serve.service import Service

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/completions", summary="Continue a text", responses=streamed("Completion"))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    call, echoed = await begin_completion(request, body, "cmpl-")
    answers = Completions(call, body, echoed)
    if body.stream:
        return await open_stream(call, answers)
    results = await call.results()
    asks_logprobs = body.logprobs is not None or body.prompt_logprobs is not None
    return json_response(await worded(asks_logprobs, lambda: answers.whole(results)))


async def begin_completion(request: Request, body: CompletionRequest, prefix: str) -> tuple[Call, list[str]]:
    """Send the prompts to the engine; returns the call, and the texts that are echoed."""
    call = Call(request, prefix, body.model)
    service = call.service
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        raise invalid("max_tokens: 0 asks for nothing unless echo is true", "max_tokens")
    check_form(body.response_format)
    guide = guide_of(body, service.text.tokenizer, opened=False)
    params = completion_params(body, service.info.generation_defaults, guide)
    prompts, echoed = await _prompts(body, service, params)
    service.check_lengths(prompts, params)  # first: looking at every token takes long if there are many
    check_tokens(prompts, params, service.info.vocab_size)
    call.log("prompt", body.prompt)
    call.submit(
        prompts,
        params,
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt,
        slo=body.slo.as_slo() if body.slo is not None else None,
        guide_param="bad_words" if body.bad_words else "response_format",
    )
    return call, echoed


async def _prompts(
    body: CompletionRequest, service: Service, params: SamplingParams
) -> tuple[list[list[int]], list[str]]:
    """The prompts as tokens, and as the texts that are echoed: empty ones unless that is wanted."""
    given = body.prompt
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    prompts: list[list[int]] = []
    echoed: list[str] = []
    most_contexts = 1 if body.truncate_prompt_tokens is None else COUNTED_CONTEXTS
    parse = body.parse_special_tokens
    for prompt in several:
        tokens = (
            await service.text.encode(prompt, parse_special_tokens=parse, most_contexts=most_contexts)
            if isinstance(prompt, str)
            else list(prompt)
        )
        tokens = last_tokens(body, tokens, service.info.max_context, params.max_tokens)
        if not tokens:
            raise invalid("the prompt is empty: there is nothing to continue", "prompt")
        prompts.append(tokens)
        if not body.echo:
            echoed.append("")
        elif isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            echoed.append(prompt)
        else:
            echoed.append(service.text.tokenizer.decode(tokens, skip_special=params.skip_special_tokens))
    return prompts, echoed


class Completions(EventWriter):
    """Words the answers of one request: each choice whole, or piece by piece as it is made."""

    def __init__(self, call: Call, body: CompletionRequest, echoed: list[str]) -> None:
        """`echoed`: what stands before each prompt's answers."""
        self._call, self._body, self._echoed = call, body, echoed
        # Only the prompt is wanted. The engine draws at least one token, which is not told.
        self._nothing_new = body.max_tokens == 0
        self._counts = StreamCounts(call, body)
        self._base: dict[str, Any] = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
            "system_fingerprint": call.service.fingerprint,
        }
        # Of the choices that have begun: characters of the text that the client has.
        self._shown: dict[int, int] = {}
        self._columns: dict[int, CompletionColumns] = {}

    def whole(self, results: list[Finished]) -> dict[str, Any]:
        body, choices = self._body, []
        for position, finished in enumerate(results):
            for sample in finished.samples:
                choice = self._choice(position, sample, finished.prompt_logprobs)
                if body.prompt_logprobs is not None:
                    of_tokens = finished.prompt_logprobs or []
                    choice["prompt_logprobs"] = prompt_logprobs(
                        self._call.service.text, of_tokens, body.prompt_logprobs
                    )
                choices.append(choice)
        counts = usage(results, len(choices) if self._nothing_new else 0, is_search(body))
        return {**self._base, "choices": choices, "usage": counts}

    def add(self, batch: Batch) -> bytes:
        """Chunks of what is new; those that are new at the same time go in one piece."""
        chunks: list[bytes] = []
        for position, item in batch:
            if isinstance(item, Delta):
                if not self._nothing_new:
                    self._counts.note(item)
                choice = self._choice(position, item, item.prompt_logprobs)
                ids = choice.get("token_ids")
                # Without any of these the token's text is not certain yet.
                if choice["text"] or choice["logprobs"] is not None or choice["finish_reason"] or ids:
                    chunks.append(event({**self._base, "choices": [choice], **self._counts.field()}))
        return b"".join(chunks)

    def end(self) -> bytes:
        dropped = sum(len(one.samples) for one in self._call.ended) if self._nothing_new else 0
        return self._counts.end(self._base, dropped)

    def _choice(
        self, position: int, made: Sample | Delta, of_prompt: list[TokenLogprobs] | None
    ) -> dict[str, Any]:
        """The next piece of an answer to the prompt at this position, or all of it. `of_prompt`: comes with the
        first piece."""
        call, body = self._call, self._body
        index = position * (body.n or 1) + made.index
        begins = index not in self._shown
        text, entries, ids, finish_reason = made.text, call.spoken(made), made.token_ids, made.finish_reason
        if self._nothing_new:
            text, entries, ids, finish_reason = "", [], [], "length"
        if begins:
            text = self._echoed[position] + text
        self._shown[index] = self._shown.get(index, 0) + len(text)
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._columns_of(position, index, entries, finish_reason is not None)
            if begins and body.echo:
                echoed = echoed_columns(
                    call.service.text,
                    body.logprobs,
                    call.prompts[position],
                    of_prompt or [],
                    len(self._echoed[position]),
                    call.params.skip_special_tokens,
                )
                logprobs = echoed if logprobs is None else joined_columns(echoed, logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = ids
            if begins:
                choice["prompt_token_ids"] = call.prompts[position]
        return choice

    def _columns_of(
        self, position: int, index: int, entries: Sequence[TokenLogprobs], last: bool
    ) -> dict[str, Any] | None:
        """The log-probabilities that belong to the text told so far and have not been told."""
        if index not in self._columns:
            self._columns[index] = CompletionColumns(
                self._call.service.text,
                self._call.params.logprobs or 0,
                skip_special=self._call.params.skip_special_tokens,
                start=len(self._echoed[position]),
            )
        columns = self._columns[index]
        columns.push(entries)
        shown = self._shown[index]
        return columns.finish(shown) if last else columns.next_columns(shown)
