"""/v1/embeddings: texts or token lists to vectors of length 1, pooled from the served model's hidden states."""

import asyncio
import base64
import logging
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.play.embedding import shortened
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.call import Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.observe.stories import explanation
from cumulo.serve.openai.descriptions import answers, plain
from cumulo.serve.openai.events import json_response, to_json
from cumulo.serve.openai.schemas_embeddings import EmbeddingList, EmbeddingRequest
from cumulo.serve.openai.usage import usage
from cumulo.serve.service import Service

router = APIRouter(route_class=JsonRoute)
log = logging.getLogger(__name__)

# A call of many texts does not fill the queue: so many are with the engine, the next goes when one is done.
_AT_A_TIME = 64
_VECTORS_PER_TURN = 64  # written before others get their turn: thousands of numbers take a while


@router.post(
    "/v1/embeddings",
    summary="Turn texts into vectors",
    responses=answers(plain(EmbeddingList, "The vectors.")),
)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)
    service.check_ready()
    size = service.info.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise invalid(
            f"'dimensions' is {body.dimensions}, and this model's embeddings have {size} numbers: ask for {size} "
            "or fewer",
            "dimensions",
            "invalid_value",
        )
    inputs = await _tokens(body, service)
    call = Call(service, request, "embd-", body.model)
    if service.options.log_prompts:
        log.info("%s input: %r", call.id, body.input)
    call.submit(
        inputs,
        SamplingParams(pooling=body.pooling or "mean"),
        stream=False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        at_a_time=_AT_A_TIME,
    )
    return json_response(await _answer(call, body))


async def _tokens(body: EmbeddingRequest, service: Service) -> list[list[int]]:
    given: Any = body.input
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if not isinstance(several[0], str):
        return several
    inputs = await service.text.encode_many(several, parse_special_tokens=body.parse_special_tokens)
    for position, tokens in enumerate(inputs):
        if not tokens:
            raise invalid(f"'input[{position}]' has no tokens: there is nothing to embed", "input")
    return inputs


async def _answer(call: Call, body: EmbeddingRequest) -> dict[str, Any]:
    results = await call.results()
    data = []
    for position, finished in enumerate(results):
        data.append({"object": "embedding", "index": position, "embedding": _written(finished, body)})
        if position % _VECTORS_PER_TURN == _VECTORS_PER_TURN - 1:
            await asyncio.sleep(0)
    counts = usage(results)
    del counts["completion_tokens"]
    answer: dict[str, Any] = {
        "id": call.id,
        "object": "list",
        "model": call.model,
        "data": data,
        "usage": counts,
    }
    if body.explain:
        answer["explain"] = [explanation(record) for record in call.service.stories.of_call(call.id)]
    return answer


def _written(finished: Finished, body: EmbeddingRequest) -> str | msgspec.Raw:
    if finished.embedding is None:
        raise ApiError(500, "the engine ended this request without an embedding", code="engine_error")
    numbers = np.frombuffer(finished.embedding, dtype="<f4")
    if body.dimensions is not None:
        numbers = shortened(numbers, body.dimensions).astype("<f4")
    if body.encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode("ascii")
    return msgspec.Raw(to_json(numbers.tolist()))
