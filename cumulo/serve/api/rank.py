"""/v1/score (vLLM's form) and /v1/rerank, /rerank (Cohere's and Jina's form): how well texts fit each other.

A decoder has no head trained to judge a pair, so there are two ways to use what it has. `embedding`: the cosine of
the two texts' embeddings, from -1 to 1. `likelihood`: how probable the model finds the query after reading the
document (Sachan et al. 2022, "Improving Passage Retrieval with Zero-Shot Question Generation", equation 2), as the
geometric mean of the query tokens' probabilities, from 0 to 1; its logarithm is the paper's score.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import AliasChoices, Field, StringConstraints
from starlette.responses import Response

from cumulo.engine.decide.params import Pooling, SamplingParams
from cumulo.serve.api.openai.embeddings import ask_many, input_usage, vector_of
from cumulo.serve.api.openai.events import json_response
from cumulo.serve.api.openai.schemas import ModelRequest
from cumulo.serve.api.openai.schemas_out import ERRORS, answer
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.bodies.strict import Strict
from cumulo.serve.call import Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.model_text import COUNTED_CONTEXTS, ModelText

MAX_DOCUMENTS = 1000  # as many as Cohere's API advises

Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS)]
Method = Literal["embedding", "likelihood"]


class Ranking(ModelRequest):
    """What both endpoints take."""

    method: Method | None = Field(
        "embedding",
        description="Extension: embedding is the cosine of the two texts' embeddings, likelihood how probable the "
        "model finds the query after the document.",
    )
    pooling: Pooling | None = Field(
        "mean", description="Extension, with method embedding: as /v1/embeddings takes it."
    )


class ScoreRequest(Ranking):
    text_1: Texts = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="A query, or as many as text_2 has. vLLM's other names: queries, data_1.",
    )
    text_2: Texts = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="One text or several to hold against text_1. vLLM's other names: documents, items, data_2.",
    )


class Document(Strict):
    text: Text


class RerankRequest(Ranking):
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: int | None = Field(None, ge=1, description="Answer only with so many of the best.")
    return_documents: bool | None = Field(True, description="false: leave the documents' texts out.")
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="Read only so many tokens of each document; left out: all of it."
    )


_BEFORE_DOCUMENT = "Passage:"
_AFTER_DOCUMENT = "\nPlease write a question based on this passage.\nQuestion:"  # the paper's instruction


Pairs = Sequence[tuple[str, str]]  # a query, and the document it is held against
Scored = tuple[list[float], list[Finished]]  # one number for each pair; the engine's results


async def score(call: Call, pairs: Pairs, body: Ranking, document_tokens: int | None = None) -> Scored:
    """`document_tokens`: so many of each document are read; None: all."""
    method = _likelihoods if body.method == "likelihood" else _cosines
    return await method(call, pairs, body, document_tokens)


async def _cosines(call: Call, pairs: Pairs, body: Ranking, document_tokens: int | None) -> Scored:
    # Texts that come several times (the query of a reranking) are embedded once.
    queries, documents = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
    inputs = await _encode(call.service.text, queries, add_special=True)
    inputs += await _encode(call.service.text, documents, document_tokens, add_special=True)
    results = await ask_many(call, inputs, SamplingParams(pooling=body.pooling or "mean"), body)
    vectors = [vector_of(finished).astype(np.float64) for finished in results]
    of_query = dict(zip(queries, vectors, strict=False))
    of_document = dict(zip(documents, vectors[len(queries) :], strict=True))
    scores = [float(of_query[query] @ of_document[document]) for query, document in pairs]
    return [max(-1.0, min(1.0, value)) for value in scores], results


async def _likelihoods(call: Call, pairs: Pairs, body: Ranking, document_tokens: int | None) -> Scored:
    text = call.service.text
    before = await text.encode(_BEFORE_DOCUMENT)
    after = await text.encode(_AFTER_DOCUMENT, add_special=False)
    # Every part is tokenised by itself: where the query begins is then certain.
    queries = await _encode(text, [f" {query}" for query, _ in pairs])
    documents = await _encode(text, [f" {document}" for _, document in pairs], document_tokens)
    prompts = [
        [*before, *document, *after, *query] for document, query in zip(documents, queries, strict=True)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    results = await ask_many(call, prompts, params, body)
    return [_geometric_mean(*pair) for pair in zip(results, map(len, queries), strict=True)], results


async def _encode(
    text: ModelText, texts: Sequence[str], most: int | None = None, *, add_special: bool = False
) -> list[list[int]]:
    """`most`: so many tokens of each text are kept, which may then be longer than the context."""
    encoded = await text.encode_many(
        texts, add_special, most_contexts=1 if most is None else COUNTED_CONTEXTS
    )
    for given, tokens in zip(texts, encoded, strict=True):
        if not tokens:
            raise invalid(f"the text {given[:64]!r} has no tokens: there is nothing to score")
    return [tokens[:most] for tokens in encoded]


def _geometric_mean(finished: Finished, query_tokens: int) -> float:
    if not finished.prompt_logprobs or len(finished.prompt_logprobs) < query_tokens:
        raise ApiError(500, "the engine ended this request without log-probabilities", code="engine_error")
    logprobs = [entry.logprob for entry in finished.prompt_logprobs[-query_tokens:]]
    return math.exp(math.fsum(logprobs) / query_tokens)


router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/score", summary="Score pairs of texts", responses=answer("ScoreList"))
@router.post("/score", include_in_schema=False)
async def create_score(body: ScoreRequest, request: Request) -> Response:
    call = Call(request, "score-", body.model)
    call.log("texts", (body.text_1, body.text_2))
    scores, results = await score(call, _pairs(body), body)
    data = [{"object": "score", "index": index, "score": value} for index, value in enumerate(scores)]
    head = {"id": call.id, "object": "list", "created": call.created, "model": call.model}
    return json_response({**head, "data": data, "usage": input_usage(results)})


@router.post(
    "/v1/rerank", summary="Order documents by how well they fit a query", responses=answer("RerankAnswer")
)
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def create_rerank(body: RerankRequest, request: Request) -> Response:
    texts = [given if isinstance(given, str) else given.text for given in body.documents]
    call = Call(request, "rerank-", body.model)
    call.log("texts", (body.query, texts))
    pairs = [(body.query, text) for text in texts]
    scores, results = await score(call, pairs, body, body.max_tokens_per_doc)
    best_first = sorted(range(len(texts)), key=lambda index: -scores[index])  # stable: ties keep order
    ranked: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in best_first[: body.top_n]
    ]
    if body.return_documents is not False:
        for result in ranked:
            result["document"] = {"text": texts[result["index"]]}
    head = {"id": call.id, "model": call.model}
    return json_response({**head, "results": ranked, "usage": input_usage(results)})


def _pairs(body: ScoreRequest) -> Pairs:
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
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
