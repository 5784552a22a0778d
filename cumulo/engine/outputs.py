"""What the engine gives back: Delta while a request runs, RequestOutput when it has ended; and how tokens
become text (TextStream) and pooled vectors become embeddings.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumulo.engine.decide.core.request import FinishReason
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.decide.story import Story
from cumulo.models.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from cumulo.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sample gained since the last Delta. Text lags tokens where a character is incomplete or a stop
    string may be forming."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None  # with a sample's first token, where asked for


@dataclass(frozen=True, slots=True)
class Sample:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop string or stop token that ended it
    cumulative_logprob: float | None  # None unless log-probabilities were computed
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    samples: list[Sample]
    story: Story
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    embedding: list[float] | None = None  # of length 1, where pooling was asked for and nothing went wrong

    @property
    def text(self) -> str:
        """The first sample's text: all there is unless n > 1."""
        return self.samples[0].text if self.samples else ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_tokens": len(self.prompt_token_ids),
            "samples": [asdict(sample) for sample in self.samples],
            "embedding": self.embedding,
            "error": self.error,
            "story": self.story.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch of requests is; handed to `on_progress` after every step."""

    finished: int
    total: int
    prompt_tokens: int  # computed or found in the cache so far
    output_tokens: int
    elapsed_s: float

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0


Vector = NDArray[np.float64]


def normalised(vector: Vector) -> Vector:
    """The vector at length 1 (L2). A vector of zeros has no direction and stays."""
    largest = float(np.abs(vector).max(initial=0.0))
    if largest == 0:
        return vector
    scaled = vector / largest  # squares of what is near 1 neither overflow nor vanish
    unit: Vector = scaled / np.sqrt(scaled @ scaled)
    return unit


def shortened(vector: Sequence[float] | NDArray[Any], dimensions: int) -> Vector:
    """The first `dimensions` numbers, at length 1 again."""
    return normalised(np.asarray(vector[:dimensions], dtype=np.float64))


class TextStream:
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, continues=True)
        self._matcher = StopStringMatcher(params.stop, params.include_stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._pieces: list[str] = []
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """Text that is certain now. After a match, `matched` names the stop string and nothing more comes."""
        self._tokens += 1
        return self._emit(self._detokenizer.push(token), watch=self._tokens > self._min_tokens)

    def finish(self) -> str:
        """Whatever was held back, when the sample ended without a stop string."""
        if self.matched is not None:
            return ""
        text = self._emit(self._detokenizer.finish(), watch=True)
        if self._matcher is not None and self.matched is None:
            held = self._matcher.finish()
            self._pieces.append(held)
            text += held
        return text

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def _emit(self, text: str, *, watch: bool) -> str:
        if self._matcher is not None and watch and text:
            text, self.matched = self._matcher.push(text)
        if text:
            self._pieces.append(text)
        return text
