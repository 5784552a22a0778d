"""/api/chat, /api/generate, /api/embed and /api/embeddings: answers in Ollama's API, whole or as lines of JSON.

A request becomes a chat or completion request and goes the way of /v1 from there; here its answer is worded.
"""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.outputs import Delta, Sample
from cumulo.serve.api.ollama.request import Conversing, Embedding, Generating, ModelCall, OlderEmbedding
from cumulo.serve.api.openai.answer_form import AnswerReader
from cumulo.serve.api.openai.chat import begin_chat, telling_format_as
from cumulo.serve.api.openai.completions import begin_completion
from cumulo.serve.api.openai.embeddings import EmbeddingRequest, ask_many, check_size, tokens_of, written
from cumulo.serve.api.openai.events import EventWriter, json_response, open_stream, to_line
from cumulo.serve.api.openai.logprobs import chat_logprobs
from cumulo.serve.api.openai.schemas_out import OLLAMA_ERRORS, STREAMED_LINES
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, ollama_error
from cumulo.serve.formats.blocks import Blocks

router = APIRouter(route_class=JsonRoute, responses=OLLAMA_ERRORS)
Item = dict[str, Any]


@router.post("/api/chat", summary="Answer a conversation, in Ollama's API", responses=STREAMED_LINES)
async def chat(body: Conversing, request: Request) -> Response:
    return await _answer(body, request) if body.messages else _without_prompt(body, request)


@router.post("/api/generate", summary="Answer a prompt, in Ollama's API", responses=STREAMED_LINES)
async def generate(body: Generating, request: Request) -> Response:
    return await _answer(body, request) if body.prompt else _without_prompt(body, request)


async def _answer(body: Conversing | Generating, request: Request) -> Response:
    reader = AnswerReader(None, None)
    with telling_format_as("format"):
        if isinstance(body, Generating) and body.raw:
            call, _ = await begin_completion(request, body.as_completion(), "ollama-")
        else:
            call, form = await begin_chat(request, await asyncio.to_thread(body.as_chat), "ollama-")
            reader = form.reader()
    answer = OllamaAnswer(call, body, reader)
    if body.stream is not False:
        return await open_stream(call, answer)
    (finished,) = await call.results()
    return json_response(answer.whole(finished))


def _without_prompt(body: Conversing | Generating, request: Request) -> Response:
    """Nothing is asked: the model is loaded by now, and leaves with keep_alive 0 when this request has ended."""
    leaves = body.keep_s == 0 and request.app.state.models.several
    return json_response(_worded(body) | {"done": True, "done_reason": "unload" if leaves else "load"})


def _worded(
    body: Conversing | Generating, text: str = "", thoughts: str = "", calls: Sequence[Item] = ()
) -> Item:
    line = {"model": body.model, "created_at": datetime.now(UTC).isoformat(), "done": False}
    more = {"thinking": thoughts} if thoughts else {}
    if isinstance(body, Generating):
        return line | {"response": text} | more
    called = {"tool_calls": calls} if calls else {}
    return line | {"message": {"role": "assistant", "content": text} | more | called}


class OllamaAnswer(EventWriter):
    """Words one answer: whole, or as lines while it is made. A call of a tool is told when it is complete."""

    content_type = b"application/x-ndjson"

    def __init__(self, call: Call, body: Conversing | Generating, reader: AnswerReader) -> None:
        self._call, self._body, self._reader, self._blocks = call, body, reader, Blocks()

    def whole(self, finished: Finished) -> Item:
        return _worded(self._body) | self._news(finished.samples[0]) | self._end(finished)

    def add(self, batch: Batch) -> bytes:
        told = [self._news(item) for _, item in batch if isinstance(item, Delta)]
        return b"".join(to_line(line) + b"\n" for line in told if line)

    def end(self) -> bytes:
        (finished,) = self._call.ended
        return to_line(_worded(self._body) | self._end(finished)) + b"\n"

    def fail(self, error: ApiError) -> bytes:
        return ollama_error(error.message) + b"\n"

    def _news(self, made: Delta | Sample) -> Item:
        """A line of what is new; empty where nothing is certain yet."""
        last = made.finish_reason is not None
        changes = self._blocks.add(self._reader.read(made.text, last)) + (
            self._blocks.close() if last else []
        )
        grown = [(one.block.kind, one.text) for one in changes]
        text, thoughts = ("".join(text for of, text in grown if of == kind) for kind in ("text", "thoughts"))
        calls = [
            {"id": one.block.call_id,
             "function": {"index": one.block.index, "name": one.block.name, "arguments": one.block.arguments()}}
            for one in changes if one.what == "ended" and one.block.kind == "call"
        ]  # fmt: skip
        told = {}
        if self._body.logprobs and made.logprobs:
            top = self._body.top_logprobs or 0
            entries = chat_logprobs(self._call.service.text, self._call.spoken(made), top)
            told = {"logprobs": entries["content"]}
        return _worded(self._body, text, thoughts, calls) | told if text or thoughts or calls or told else {}

    def _end(self, finished: Finished) -> Item:
        story, ended_s = finished.story, time.perf_counter()
        begun_s = story.arrived_s if story.admitted_s is None else story.admitted_s
        first_s = begun_s if story.first_token_s is None else story.first_token_s
        return {
            "done": True,
            "done_reason": "length" if finished.samples[0].finish_reason == "length" else "stop",
            **_durations(self._call, finished, ended_s),
            "prompt_eval_count": story.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - begun_s),
            "eval_count": story.output_tokens,
            "eval_duration": _nanoseconds((story.finished_s or ended_s) - first_s),
        }


def _durations(call: Call, finished: Finished, ended_s: float) -> Item:
    """What came before the engine had the request is the model's loading, where it had to be loaded."""
    load_s = finished.story.arrived_s - call.received_s
    return {"total_duration": _nanoseconds(ended_s - call.received_s), "load_duration": _nanoseconds(load_s)}


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
    found = await _embedded(body, request, [body.prompt]) if body.prompt else {"embeddings": [[]]}
    return json_response({"embedding": found["embeddings"][0]})


async def _embedded(
    body: ModelCall, request: Request, texts: list[str], truncate: bool = True, dimensions: int | None = None
) -> Item:
    call = Call(request, "ollama-", body.model)
    asked = EmbeddingRequest.model_construct(model=body.model, input=texts, dimensions=dimensions)
    check_size(asked, call.service.info.hidden_size)
    inputs = await tokens_of(asked, call.service, truncate)
    results = await ask_many(call, inputs, SamplingParams(pooling="mean"), asked)
    vectors = await asyncio.to_thread(lambda: [written(one, asked) for one in results])
    return {
        "model": call.model,
        "embeddings": vectors,
        **_durations(call, results[0], time.perf_counter()),
        "prompt_eval_count": sum(one.story.prompt_tokens for one in results),
    }
