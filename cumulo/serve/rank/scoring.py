"""Scores of pairs of texts, computed by the served model. Called by the endpoints of this folder.

A decoder has no head trained to judge a pair, so there are two ways to use what it has. `embedding`: the cosine of
the two texts' embeddings, from -1 to 1. `likelihood`: how probable the model finds the query after reading the
document (Sachan et al. 2022, "Improving Passage Retrieval with Zero-Shot Question Generation", equation 2), as the
geometric mean of the query tokens' probabilities, from 0 to 1; its logarithm is the paper's score.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cumulo.engine.decide.params import SamplingParams
from cumulo.serve.call import Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.model_text import ModelText
from cumulo.serve.rank.schemas import Ranking

# A call of many texts does not fill the queue: so many are with the engine, the next goes when one is done.
AT_A_TIME = 64
_BEFORE_DOCUMENT = "Passage:"
_AFTER_DOCUMENT = "\nPlease write a question based on this passage.\nQuestion:"  # the paper's instruction


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and the text it is held against; the fields name them in error messages."""

    query: str
    document: str
    query_field: str
    document_field: str


@dataclass(frozen=True, slots=True)
class Scored:
    scores: list[float]  # in the order of the pairs
    results: list[Finished]  # of the engine, for the token counts


async def score(call: Call, pairs: Sequence[Pair], body: Ranking, document_tokens: int | None) -> Scored:
    """`document_tokens`: so many of each document are read; None: all."""
    if body.method == "likelihood":
        return await _likelihoods(call, pairs, body, document_tokens)
    return await _cosines(call, pairs, body, document_tokens)


async def _cosines(call: Call, pairs: Sequence[Pair], body: Ranking, document_tokens: int | None) -> Scored:
    # Texts that come several times (the query of a reranking) are embedded once.
    places: dict[tuple[str, bool], int] = {}
    fields: list[str] = []
    for pair in pairs:
        for text, field, cut in (
            (pair.query, pair.query_field, False),
            (pair.document, pair.document_field, document_tokens is not None),
        ):
            if (text, cut) not in places:
                places[text, cut] = len(places)
                fields.append(field)
    inputs = await _encode(call.service.text, [text for text, _ in places], fields, add_special=True)
    for (_, cut), position in places.items():
        if cut:
            inputs[position] = inputs[position][:document_tokens]
    results = await _ask(call, inputs, SamplingParams(pooling=body.pooling or "mean"), body)
    vectors = [_vector(finished) for finished in results]
    cut = document_tokens is not None
    scores = [
        float(vectors[places[pair.query, False]] @ vectors[places[pair.document, cut]]) for pair in pairs
    ]
    return Scored([max(-1.0, min(1.0, value)) for value in scores], results)


async def _likelihoods(
    call: Call, pairs: Sequence[Pair], body: Ranking, document_tokens: int | None
) -> Scored:
    text = call.service.text
    before = await text.encode(_BEFORE_DOCUMENT)
    after = await text.encode(_AFTER_DOCUMENT, add_special=False)
    # Every part is tokenised by itself: where the query begins is then certain.
    queries = await _encode(text, [" " + p.query for p in pairs], [p.query_field for p in pairs])
    documents = await _encode(text, [" " + p.document for p in pairs], [p.document_field for p in pairs])
    prompts = [
        [*before, *document[:document_tokens], *after, *query]
        for document, query in zip(documents, queries, strict=True)
    ]
    results = await _ask(
        call, prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), body
    )
    scores = [_geometric_mean(finished, len(query)) for finished, query in zip(results, queries, strict=True)]
    return Scored(scores, results)


async def _encode(
    text: ModelText, texts: Sequence[str], fields: Sequence[str], *, add_special: bool = False
) -> list[list[int]]:
    encoded = await text.encode_many(texts, add_special=add_special)
    for tokens, field in zip(encoded, fields, strict=True):
        if not tokens:
            raise invalid(f"'{field}' has no tokens: there is nothing to score", field)
    return encoded


async def _ask(call: Call, prompts: list[list[int]], params: SamplingParams, body: Ranking) -> list[Finished]:
    call.submit(
        prompts,
        params,
        stream=False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        at_a_time=AT_A_TIME,
    )
    return await call.results()


def _vector(finished: Finished) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    if finished.embedding is None:
        raise ApiError(500, "the engine ended this request without an embedding", code="engine_error")
    return np.frombuffer(finished.embedding, dtype="<f4").astype(np.float64)


def _geometric_mean(finished: Finished, query_tokens: int) -> float:
    if not finished.prompt_logprobs or len(finished.prompt_logprobs) < query_tokens:
        raise ApiError(500, "the engine ended this request without log-probabilities", code="engine_error")
    logprobs = [entry.logprob for entry in finished.prompt_logprobs[-query_tokens:]]
    return math.exp(math.fsum(logprobs) / query_tokens)
