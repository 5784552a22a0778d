"""/api/chat, /api/generate, /api/embed and /api/embeddings: answers in Ollama's API, whole or as lines of JSON.

A request becomes a chat request and goes the way of /v1/chat/completions from there; here its answer is worded.
"""

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.outputs import Delta, Sample
from cumulo.serve.api.ollama.request import (
    AnswerCall,
    Conversing,
    Embedding,
    Generating,
    ModelCall,
    OlderEmbedding,
)
from cumulo.serve.api.openai.answer_form import AnswerReader, guide_of
from cumulo.serve.api.openai.chat import begin_chat, telling_format_as
from cumulo.serve.api.openai.embeddings import EmbeddingRequest, ask_many, check_size, written
from cumulo.serve.api.openai.events import EventWriter, json_response, open_stream, to_line
from cumulo.serve.api.openai.logprobs import chat_logprobs
from cumulo.serve.api.openai.sampling import completion_params
from cumulo.serve.api.openai.schemas import CompletionRequest
from cumulo.serve.api.openai.schemas_out import OLLAMA_ERRORS, STREAMED_LINES
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.bodies.warnings import warn
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, invalid, ollama_error, problem_error
from cumulo.serve.formats.blocks import Block, Blocks
from cumulo.serve.model_table import LOAD_S
from cumulo.serve.model_text import COUNTED_CONTEXTS

router = APIRouter(route_class=JsonRoute, responses=OLLAMA_ERRORS)
Item = dict[str, Any]


@router.post("/api/chat", summary="Answer a conversation, in Ollama's API", responses=STREAMED_LINES)
async def chat(body: Conversing, request: Request) -> Response:
    if not body.messages:
        return _without_prompt(body, request, {"message": {"role": "assistant", "content": ""}})
    with telling_format_as("format"):
        call, form = await begin_chat(request, await asyncio.to_thread(body.as_chat), "ollama-")
    return await _answer(call, body, OllamaAnswer(call, body, form.reader(), True, _load_s(request)))


@router.post("/api/generate", summary="Answer a prompt, in Ollama's API", responses=STREAMED_LINES)
async def generate(body: Generating, request: Request) -> Response:
    if not body.prompt:
        return _without_prompt(body, request, {"response": ""})
    with telling_format_as("format"):
        if body.raw:
            call, reader = await _begin_raw(body, request)
        else:
            call, form = await begin_chat(request, await asyncio.to_thread(body.as_chat), "ollama-")
            reader = form.reader()
    return await _answer(call, body, OllamaAnswer(call, body, reader, False, _load_s(request)))


async def _begin_raw(body: Generating, request: Request) -> tuple[Call, AnswerReader]:
    """The prompt as it stands, without the model's chat template."""
    if body.system:
        raise invalid(
            "system needs the model's chat template, which raw leaves out: put it into the prompt", "system"
        )
    call = Call(request, "ollama-", body.model)
    service = call.service
    tokens = await service.text.encode(body.prompt)
    limit = service.options.chat_limit or service.info.max_context
    given = {"max_tokens": limit} | {name: one for name, one in body.run_fields.items() if one is not None}
    fields = {"model": body.model, "prompt": body.prompt, "response_format": body.form, **given,
              "logprobs": (body.top_logprobs or 0) if body.logprobs else None}  # fmt: skip
    try:
        asked = CompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise problem_error(error.errors()) from None
    guide = guide_of(asked, service.text.tokenizer, opened=False)
    params = completion_params(asked, service.info.generation_defaults, guide)
    call.log("prompt", body.prompt)
    call.submit([tokens], params, stream=body.stream is not False, guide_param="format")
    return call, AnswerReader(None, None)


def _load_s(request: Request) -> float:
    found: float = request.scope["state"].get(LOAD_S, 0.0)
    return found


def _without_prompt(body: ModelCall, request: Request, empty: Item) -> Response:
    """Nothing is asked: the model is loaded by now, and leaves with keep_alive 0 when this request has ended."""
    leaves = body.keep_s == 0 and request.app.state.models.several
    why = "unload" if leaves else "load"
    return json_response(
        {"model": body.model, "created_at": now(), **empty, "done": True, "done_reason": why}
    )


async def _answer(call: Call, body: AnswerCall, answer: "OllamaAnswer") -> Response:
    context = call.service.info.max_context
    if body.options is not None and (body.options.num_ctx or 0) > context:
        warn(
            f"options.num_ctx is {body.options.num_ctx:,}, and this model is served with a context of {context:,}"
        )
    if body.stream is not False:
        return await open_stream(call, answer)
    (finished,) = await call.results()
    return json_response(answer.whole(finished))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(EventWriter):
    """Words one answer: whole, or as lines while it is made. A call of a tool is told when it is complete."""

    content_type = b"application/x-ndjson"

    def __init__(
        self, call: Call, body: AnswerCall, reader: AnswerReader, as_chat: bool, load_s: float
    ) -> None:
        self._call, self._body, self._reader, self._as_chat = call, body, reader, as_chat
        self._load_s, self._blocks = load_s, Blocks()

    def whole(self, finished: Finished) -> Item:
        sample = finished.samples[0]
        self._blocks.add(self._reader.read(sample.text, last=True))
        self._blocks.close()
        blocks = self._blocks.blocks
        text, thoughts = (
            "".join(one.text for one in blocks if one.kind == kind) for kind in ("text", "thoughts")
        )
        calls = [self._called(one) for one in blocks if one.kind == "call"]
        return self._line(text, thoughts, calls) | self._logprobs(sample) | self._end(finished)

    def add(self, batch: Batch) -> bytes:
        lines = list[Item]()
        for _, item in batch:
            if isinstance(item, Delta):
                lines += self._lines(item)
        return b"".join(to_line(line) + b"\n" for line in lines)

    def _lines(self, item: Delta) -> list[Item]:
        last = item.finish_reason is not None
        changes = self._blocks.add(self._reader.read(item.text, last)) + (
            self._blocks.close() if last else []
        )
        lines = list[Item]()
        for change in changes:
            kind = change.block.kind
            if change.what == "ended" and kind == "call":
                lines.append(self._line("", "", [self._called(change.block)]))
            elif change.what == "grown" and kind != "call" and change.text:
                lines.append(self._line(*((change.text, "") if kind == "text" else ("", change.text)), []))
        told = self._logprobs(item)
        if told and not lines:
            lines.append(self._line("", "", []))
        if told:
            lines[0] |= told
        return lines

    def end(self) -> bytes:
        (finished,) = self._call.ended
        return to_line(self._line("", "", []) | self._end(finished)) + b"\n"

    def fail(self, error: ApiError) -> bytes:
        return ollama_error(error.message) + b"\n"

    # -- spelling -----------------------------------------------------------------------------------------
    def _line(self, text: str, thoughts: str, calls: list[Item]) -> Item:
        line: Item = {"model": self._call.model, "created_at": now()}
        more = {"thinking": thoughts} if thoughts else {}
        if not self._as_chat:
            return line | {"response": text} | more | {"done": False}
        message = {"role": "assistant", "content": text} | more | ({"tool_calls": calls} if calls else {})
        return line | {"message": message, "done": False}

    def _called(self, block: Block) -> Item:
        arguments = block.arguments()
        return {
            "id": block.call_id,
            "function": {"index": block.index, "name": block.name, "arguments": arguments},
        }

    def _logprobs(self, made: Delta | Sample) -> Item:
        if not self._body.logprobs or not made.logprobs:
            return {}
        entries = chat_logprobs(
            self._call.service.text, self._call.spoken(made), self._body.top_logprobs or 0
        )
        return {"logprobs": entries["content"]}

    def _end(self, finished: Finished) -> Item:
        story, ended_s = finished.story, time.perf_counter()
        begun_s = story.admitted_s if story.admitted_s is not None else story.arrived_s
        first_s = story.first_token_s if story.first_token_s is not None else begun_s
        return {
            "done": True,
            "done_reason": "length" if finished.samples[0].finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(ended_s - self._call.received_s),
            "load_duration": _nanoseconds(self._load_s),
            "prompt_eval_count": story.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - begun_s),
            "eval_count": story.output_tokens,
            "eval_duration": _nanoseconds((story.finished_s or ended_s) - first_s),
        }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


# -- embeddings -------------------------------------------------------------------------------------------
@router.post("/api/embed", summary="Turn texts into vectors, in Ollama's API")
async def embed(body: Embedding, request: Request) -> Response:
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        return json_response({"model": body.model, "embeddings": []})
    return json_response(await _embedded(body, request, texts, body.truncate is not False, body.dimensions))


@router.post("/api/embeddings", summary="Turn a text into a vector, in Ollama's older API")
async def embeddings(body: OlderEmbedding, request: Request) -> Response:
    if not body.prompt:
        return json_response({"embedding": []})
    answer = await _embedded(body, request, [body.prompt], True, None)
    return json_response({"embedding": answer["embeddings"][0]})


async def _embedded(
    body: ModelCall, request: Request, texts: list[str], truncate: bool, dimensions: int | None
) -> Item:
    call = Call(request, "ollama-", body.model)
    asked = EmbeddingRequest.model_construct(model=body.model, input=texts, dimensions=dimensions)
    check_size(asked, call.service.info.hidden_size)
    most_contexts = COUNTED_CONTEXTS if truncate else 1
    inputs = await call.service.text.encode_many(texts, most_contexts=most_contexts)
    if truncate:
        inputs = [tokens[: call.service.info.max_context] for tokens in inputs]
    if empty := [place for place, tokens in enumerate(inputs) if not tokens]:
        raise invalid(f"'input[{empty[0]}]' has no tokens: there is nothing to embed", "input")
    results = await ask_many(call, inputs, SamplingParams(pooling="mean"), asked)
    vectors = await asyncio.to_thread(lambda: [written(one, asked) for one in results])
    return {
        "model": call.model,
        "embeddings": vectors,
        "total_duration": _nanoseconds(time.perf_counter() - call.received_s),
        "load_duration": _nanoseconds(_load_s(request)),
        "prompt_eval_count": sum(one.story.prompt_tokens for one in results),
    }
