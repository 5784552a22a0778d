"""/v1/embeddings: texts or token lists to vectors of length 1, pooled from the served model's hidden states."""

import asyncio
import base64
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import Field, StringConstraints
from starlette.responses import Response

from cumulo.engine.decide.params import Pooling, SamplingParams
from cumulo.engine.outputs import shortened
from cumulo.serve.api.openai.events import json_response, to_json, usage
from cumulo.serve.api.openai.schemas import ModelRequest, ParsesSpecial, Token
from cumulo.serve.api.openai.schemas_out import ERRORS, answer
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.call import Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.model_text import COUNTED_CONTEXTS
from cumulo.serve.service import Service

MAX_INPUTS = 2048  # as many as OpenAI's API takes

Text = Annotated[str, StringConstraints(min_length=1)]
Tokens = Annotated[list[Token], Field(min_length=1)]


class EmbeddingRequest(ModelRequest):
    input: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS)]
    ) = Field(description="A text, its tokens, or several of either.")
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="base64: the numbers as 32-bit floats, little end first."
    )
    dimensions: int | None = Field(
        None, ge=1, le=1 << 31, description="Keep so many of the first numbers, at length 1 again."
    )
    # -- extensions
    pooling: Pooling | None = Field(
        "mean", description="Extension: the mean of all tokens' final hidden states, or the last token's."
    )
    parse_special_tokens: ParsesSpecial = None


router = APIRouter(route_class=JsonRoute, responses=ERRORS)

# A call of many texts does not fill the queue: so many are with the engine, the next goes when one is done.
_AT_A_TIME = 64


@router.post("/v1/embeddings", summary="Turn texts into vectors", responses=answer("EmbeddingList"))
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    call = Call(request, "embd-", body.model)
    service = call.service
    check_size(body, service.info.hidden_size)
    inputs = await tokens_of(body, service)
    call.log("input", body.input)
    results = await ask_many(call, inputs, SamplingParams(pooling=body.pooling or "mean"), body)
    # In a thread: there may be millions of numbers.
    return json_response(await asyncio.to_thread(lambda: msgspec.Raw(to_json(_answer(call, body, results)))))


def check_size(body: EmbeddingRequest, size: int) -> None:
    if body.dimensions is not None and body.dimensions > size:
        raise invalid(
            f"'dimensions' is {body.dimensions}, and this model's embeddings have {size} numbers: ask for {size} "
            "or fewer",
            "dimensions",
            "invalid_value",
        )


async def ask_many(
    call: Call, inputs: list[list[int]], params: SamplingParams, body: ModelRequest
) -> list[Finished]:
    """Send the inputs to the engine, a bounded number at a time, and wait for all results."""
    call.submit(
        inputs, params, stream=False, priority=body.priority, cache_salt=body.cache_salt, at_a_time=_AT_A_TIME
    )
    return await call.results()


async def tokens_of(body: EmbeddingRequest, service: Service, truncate: bool = False) -> list[list[int]]:
    """`truncate`: texts that are longer than the context are cut."""
    given: Any = body.input
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if not isinstance(several[0], str):
        return several
    parse, most_contexts = body.parse_special_tokens, COUNTED_CONTEXTS if truncate else 1
    inputs = await service.text.encode_many(several, parse_special_tokens=parse, most_contexts=most_contexts)
    for position, tokens in enumerate(inputs):
        if not tokens:
            raise invalid(f"'input[{position}]' has no tokens: there is nothing to embed", "input")
    return [tokens[: service.info.max_context] for tokens in inputs] if truncate else inputs


def _answer(call: Call, body: EmbeddingRequest, results: list[Finished]) -> dict[str, Any]:
    return {
        "id": call.id,
        "object": "list",
        "model": call.model,
        "data": [
            {"object": "embedding", "index": position, "embedding": written(finished, body)}
            for position, finished in enumerate(results)
        ],
        "usage": input_usage(results),
    }


def input_usage(results: list[Finished]) -> dict[str, Any]:
    """The counts of a call that has no answer in tokens. A token that the engine had to draw all the same is not
    counted."""
    counts = usage(results)
    counts["total_tokens"] = counts["prompt_tokens"]
    del counts["completion_tokens"]
    return counts


def vector_of(finished: Finished) -> NDArray[np.float32]:
    if finished.embedding is None:
        raise ApiError(500, "the engine ended this request without an embedding", code="engine_error")
    return np.frombuffer(finished.embedding, dtype="<f4")


def written(finished: Finished, body: EmbeddingRequest) -> str | list[float]:
    numbers = vector_of(finished)
    if body.dimensions is not None:
        numbers = shortened(numbers, body.dimensions).astype("<f4")
    if body.encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode("ascii")
    spelled: list[float] = numbers.tolist()
    return spelled
