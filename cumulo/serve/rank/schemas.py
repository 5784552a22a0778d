"""The request bodies of /v1/score and /v1/rerank, and what they answer."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from cumulo.engine.decide.params import Pooling
from cumulo.serve.openai.fields import Strict
from cumulo.serve.openai.schemas import Label
from cumulo.serve.openai.schemas_out import CachedTokens, Explanation

MAX_DOCUMENTS = 1000  # as many as Cohere's API advises

Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS)]
Method = Literal["embedding", "likelihood"]


class Ranking(Strict):
    """What both endpoints take."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    user: Label | None = Field(None, description="Accepted for compatibility; not used.")
    # -- extensions
    method: Method | None = Field(
        "embedding",
        description="Extension: embedding is the cosine of the two texts' embeddings, likelihood how probable the "
        "model finds the query after the document.",
    )
    pooling: Pooling | None = Field(
        "mean", description="Extension, with method embedding: as /v1/embeddings takes it."
    )
    priority: int | None = Field(None, ge=-100, le=100, description="Extension: lower goes first.")
    cache_salt: Label | None = Field(
        None, description="Extension: share cached prefixes only with requests of the same salt."
    )
    explain: bool | None = Field(None, description="Extension: add the requests' stories to the answer.")


class ScoreRequest(Ranking):
    text_1: Texts = Field(description="A query, or as many as text_2 has.")
    text_2: Texts = Field(description="One text or several to hold against text_1.")


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


class RankUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Score(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: RankUsage
    explain: list[Explanation] | None = None


class RankedDocument(BaseModel):
    text: str


class RankedResult(BaseModel):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankAnswer(BaseModel):
    id: str
    model: str
    results: list[RankedResult]
    usage: RankUsage
    explain: list[Explanation] | None = None
