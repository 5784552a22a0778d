"""/v1/score (vLLM's form) and /v1/rerank, /rerank (Cohere's and Jina's form). Installed by `create_app`."""

import logging
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.call import Call
from cumulo.serve.errors import invalid
from cumulo.serve.observe.stories import explanation
from cumulo.serve.openai.descriptions import answers, plain
from cumulo.serve.openai.events import json_response
from cumulo.serve.openai.usage import usage
from cumulo.serve.rank.schemas import Ranking, RerankAnswer, RerankRequest, ScoreList, ScoreRequest
from cumulo.serve.rank.scoring import Pair, Scored, score
from cumulo.serve.service import Service

router = APIRouter(route_class=JsonRoute)
log = logging.getLogger(__name__)

_RERANKED = answers(plain(RerankAnswer, "The documents, best first."))
_SCORED = answers(plain(ScoreList, "A score per pair, in the order of the texts."))


@router.post("/v1/score", summary="Score pairs of texts", responses=_SCORED)
@router.post("/score", include_in_schema=False)
async def create_score(body: ScoreRequest, request: Request) -> Response:
    call = _begin(body, request, "score-", (body.text_1, body.text_2))
    scored = await score(call, _pairs(body), body, document_tokens=None)
    data = [{"object": "score", "index": index, "score": value} for index, value in enumerate(scored.scores)]
    head = {"id": call.id, "object": "list", "created": call.created, "model": call.model}
    return json_response({**head, "data": data, **_end(call, body, scored)})


@router.post("/v1/rerank", summary="Order documents by how well they fit a query", responses=_RERANKED)
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def create_rerank(body: RerankRequest, request: Request) -> Response:
    texts = [given if isinstance(given, str) else given.text for given in body.documents]
    call = _begin(body, request, "rerank-", (body.query, texts))
    pairs = [Pair(body.query, text, "query", f"documents[{position}]") for position, text in enumerate(texts)]
    scored = await score(call, pairs, body, body.max_tokens_per_doc)
    best_first = sorted(range(len(texts)), key=lambda index: -scored.scores[index])  # stable: ties keep order
    results: list[dict[str, Any]] = []
    for index in best_first[: body.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scored.scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    head = {"id": call.id, "model": call.model}
    return json_response({**head, "results": results, **_end(call, body, scored)})


def _begin(body: Ranking, request: Request, prefix: str, texts: Any) -> Call:
    service: Service = request.app.state.service
    service.check_model(body.model)
    service.check_ready()
    call = Call(service, request, prefix, body.model)
    if service.options.log_prompts:
        log.info("%s texts: %r", call.id, texts)
    return call


def _pairs(body: ScoreRequest) -> list[Pair]:
    """One against one, one against several, or several against as many."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise invalid(
            f"'text_1' has {len(first)} texts and 'text_2' has {len(second)}: give one text_1 for all, or as many "
            "as text_2 has",
            "text_1",
            "invalid_value",
        )
    return [
        Pair(first[position % len(first)], text, f"text_1[{position % len(first)}]", f"text_2[{position}]")
        for position, text in enumerate(second)
    ]


def _end(call: Call, body: Ranking, scored: Scored) -> dict[str, Any]:
    # A likelihood's request draws one token, since the engine draws at least one; nobody asked for it.
    counts = usage(scored.results)
    counts["total_tokens"] = counts["prompt_tokens"]
    del counts["completion_tokens"]
    if not body.explain:
        return {"usage": counts}
    stories = [explanation(record) for record in call.service.stories.of_call(call.id)]
    return {"usage": counts, "explain": stories}
