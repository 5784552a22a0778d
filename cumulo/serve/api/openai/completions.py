"""/v1/completions: one text or many continued, as texts or as tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.outputs import Delta, Sample
from cumulo.serve.api.openai.events import (
    EventWriter,
    StreamCounts,
    event,
    json_response,
    last_chunks,
    open_stream,
    usage,
)
from cumulo.serve.api.openai.logprobs import (
    CompletionColumns,
    echoed_columns,
    joined_columns,
    prompt_logprobs,
    spoken,
    worded,
)
from cumulo.serve.api.openai.sampling import check_tokens, completion_params, is_search
from cumulo.serve.api.openai.schemas import CompletionRequest
from cumulo.serve.api.openai.schemas_out import ERRORS, STREAMED, Completion
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import invalid
from cumulo.serve.service import Service

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request: what the wording of its answer needs to know."""

    body: CompletionRequest
    prompts: list[list[int]]
    echoed: list[str]  # the prompts as texts; empty texts unless they are wanted
    ends: frozenset[int]  # tokens that end an answer
    skip_special: bool

    @property
    def nothing_new(self) -> bool:
        """Only the prompt is wanted. The engine draws at least one token, which is not told."""
        return self.body.max_tokens == 0

    def columns(self, service: Service, position: int) -> CompletionColumns:
        top = self.body.logprobs or 0
        start = len(self.echoed[position])
        return CompletionColumns(service.text, top, skip_special=self.skip_special, start=start)

    def echoed_columns(self, service: Service, position: int, entries: Any) -> dict[str, Any]:
        prompt, length = self.prompts[position], len(self.echoed[position])
        top = self.body.logprobs or 0
        return echoed_columns(service.text, top, prompt, entries or [], length, self.skip_special)


@router.post("/v1/completions", summary="Continue a text", response_model=Completion, responses=STREAMED)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    call = Call(request, "cmpl-", body.model)
    service = call.service
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        raise invalid("max_tokens: 0 asks for nothing unless echo is true", "max_tokens")
    params = completion_params(body, service.info.generation_defaults)
    asked = await _asked(body, service, params)
    service.check_lengths(asked.prompts, params)  # first: looking at every token takes long if there are many
    check_tokens(asked.prompts, params, service.info.vocab_size)
    call.log("prompt", body.prompt)
    call.submit(
        asked.prompts,
        params,
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt,
        slo=body.slo.as_slo() if body.slo is not None else None,
    )
    if body.stream:
        return await open_stream(call, CompletionEvents(call, asked))
    results = await call.results()
    asks_logprobs = body.logprobs is not None or body.prompt_logprobs is not None
    return json_response(await worded(asks_logprobs, lambda: _answer(call, asked, results)))


async def _asked(body: CompletionRequest, service: Service, params: SamplingParams) -> Asked:
    given = body.prompt
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    prompts: list[list[int]] = []
    echoed: list[str] = []
    for prompt in several:
        tokens = (
            await service.text.encode(prompt, parse_special_tokens=body.parse_special_tokens)
            if isinstance(prompt, str)
            else list(prompt)
        )
        if not tokens:
            raise invalid("the prompt is empty: there is nothing to continue", "prompt")
        prompts.append(tokens)
        if not body.echo:
            echoed.append("")
        elif isinstance(prompt, str):
            echoed.append(prompt)
        else:
            echoed.append(service.text.tokenizer.decode(tokens, skip_special=params.skip_special_tokens))
    ends = frozenset((*service.info.eos_ids, *params.stop_token_ids))
    return Asked(body, prompts, echoed, ends, params.skip_special_tokens)


def _answer(call: Call, asked: Asked, results: list[Finished]) -> dict[str, Any]:
    choices = [
        _choice(asked, call.service, position, finished, sample)
        for position, finished in enumerate(results)
        for sample in finished.samples
    ]
    answer: dict[str, Any] = {
        "id": call.id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "usage": usage(results, len(choices) if asked.nothing_new else 0, is_search(asked.body)),
    }
    if asked.body.explain:
        answer["explain"] = call.stories()
    return answer


def _choice(
    asked: Asked, service: Service, position: int, finished: Finished, sample: Sample
) -> dict[str, Any]:
    body = asked.body
    text, entries, ids = sample.text, sample.logprobs, sample.token_ids
    finish_reason = sample.finish_reason
    if asked.nothing_new:
        text, entries, ids, finish_reason = "", [], [], "length"
    text = asked.echoed[position] + text
    logprobs = None
    if body.logprobs is not None:
        columns = asked.columns(service, position)
        columns.push(spoken(entries, finish_reason, asked.ends))
        logprobs = columns.finish(len(text))
        if body.echo:
            of_prompt = asked.echoed_columns(service, position, finished.prompt_logprobs)
            logprobs = joined_columns(of_prompt, logprobs)
    choice: dict[str, Any] = {
        "index": position * (body.n or 1) + sample.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    if body.prompt_logprobs is not None:
        of_tokens = finished.prompt_logprobs or []
        choice["prompt_logprobs"] = prompt_logprobs(service.text, of_tokens, body.prompt_logprobs)
    if body.return_token_ids:
        choice |= {"prompt_token_ids": asked.prompts[position], "token_ids": ids}
    return choice


class CompletionEvents(EventWriter):
    """Answers as chunks; those that are new at the same time go in one piece."""

    def __init__(self, call: Call, asked: Asked) -> None:
        self._call, self._asked, self._body = call, asked, asked.body
        self._samples = asked.body.n or 1
        self._counts = StreamCounts(call, asked.body.stream_options)
        self._base: dict[str, Any] = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
        }
        self._begun: set[int] = set()
        self._shown: dict[int, int] = {}  # characters of a choice's text that the client has, where counted
        self._columns: dict[int, CompletionColumns] = {}

    def add(self, batch: Batch) -> bytes:
        pieces: list[bytes] = []
        for position, item in batch:
            if not isinstance(item, Delta):
                continue
            index = position * self._samples + item.index
            pieces += self._chunk(position, index, item)
        return b"".join(pieces)

    def end(self) -> bytes:
        dropped = (
            sum(len(one.samples) for one in self._call.finished if one) if self._asked.nothing_new else 0
        )
        return last_chunks(self._call, self._body, self._base, self._counts, dropped)

    def _chunk(self, position: int, index: int, item: Delta) -> list[bytes]:
        begins = index not in self._begun
        self._begun.add(index)
        text, entries, ids = item.text, item.logprobs, item.token_ids
        finish_reason = item.finish_reason
        if self._asked.nothing_new:
            text, entries, ids = "", [], []
            finish_reason = "length"
        else:
            self._counts.note(item)
        if begins:
            text = self._asked.echoed[position] + text
        logprobs = None
        if self._body.logprobs is not None:
            told = spoken(entries, finish_reason, self._asked.ends)
            logprobs = self._columns_of(position, index, text, told, finish_reason is not None)
            if begins and self._body.echo:
                of_prompt = self._asked.echoed_columns(self._call.service, position, item.prompt_logprobs)
                logprobs = of_prompt if logprobs is None else joined_columns(of_prompt, logprobs)
        if (
            not text
            and logprobs is None
            and finish_reason is None
            and not (self._body.return_token_ids and ids)
        ):
            return []  # the token's text is not certain yet
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = ids
            if begins:
                choice["prompt_token_ids"] = self._asked.prompts[position]
        return [event({**self._base, "choices": [choice], **self._counts.field()})]

    def _columns_of(
        self, position: int, index: int, text: str, entries: Sequence[TokenLogprobs], last: bool
    ) -> dict[str, Any] | None:
        """The log-probabilities that belong to the text told so far and have not been told."""
        if index not in self._columns:
            self._columns[index] = self._asked.columns(self._call.service, position)
        columns = self._columns[index]
        columns.push(entries)
        self._shown[index] = shown = self._shown.get(index, 0) + len(text)
        return columns.finish(shown) if last else columns.next_columns(shown)
