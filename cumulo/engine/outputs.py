"""What the engine gives back: Delta while a request runs, RequestOutput when it has ended."""

from dataclasses import dataclass, field
from typing import Any

from cumulo.engine.decide.core.request import FinishReason
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.decide.story import Story


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
            "samples": [
                {
                    "index": s.index,
                    "text": s.text,
                    "token_ids": s.token_ids,
                    "finish_reason": s.finish_reason,
                    "stop_reason": s.stop_reason,
                    "cumulative_logprob": s.cumulative_logprob,
                }
                for s in self.samples
            ],
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
