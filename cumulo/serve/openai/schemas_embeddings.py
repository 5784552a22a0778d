"""The request body of /v1/embeddings and what it answers."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from cumulo.engine.decide.params import Pooling
from cumulo.serve.openai.fields import Strict
from cumulo.serve.openai.schemas import Label, Token
from cumulo.serve.openai.schemas_out import CachedTokens, Explanation

MAX_INPUTS = 2048  # as many as OpenAI's API takes

Text = Annotated[str, StringConstraints(min_length=1)]
Tokens = Annotated[list[Token], Field(min_length=1)]


class EmbeddingRequest(Strict):
    model: str = Field(description="The served model's name, as /v1/models lists it.")
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
    user: Label | None = Field(None, description="Accepted for compatibility; not used.")
    # -- extensions
    pooling: Pooling | None = Field(
        "mean", description="Extension: the mean of all tokens' final hidden states, or the last token's."
    )
    parse_special_tokens: bool | None = Field(
        None,
        description="Extension: true recognises special tokens written in the input; otherwise they are text.",
    )
    priority: int | None = Field(None, ge=-100, le=100, description="Extension: lower goes first.")
    cache_salt: Label | None = Field(
        None, description="Extension: share cached prefixes only with requests of the same salt."
    )
    explain: bool | None = Field(None, description="Extension: add the requests' stories to the answer.")


class EmbeddingObject(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"]
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage
    explain: list[Explanation] | None = None
