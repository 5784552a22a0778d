"""What was measured of one request: times, tokens, how it ended. Written by the player, read by everyone else."""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds since the level began. Latencies count from `due_s`, when it should have been sent:
    a generator or a full connection pool that is late makes the figures worse, never better."""

    number: int
    conversation: int
    turn: int
    measured: bool
    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    input_tokens_planned: int = 0
    output_tokens_planned: int = 0
    input_tokens: int | None = None  # by the server's own count
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None  # the kind, for counting
    error_detail: str = ""
    attempts: int = 1

    @property
    def output_tokens(self) -> int:
        """The server's count where it gives one; otherwise a chunk counts as a token."""
        return len(self.chunk_times_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times_s[0] - self.due_s if self.chunk_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        if len(self.chunk_times_s) < 2 or self.output_tokens < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def lateness_s(self) -> float:
        return self.sent_s - self.due_s

    @property
    def itls_s(self) -> list[float]:
        """Times between successive chunks, as the user sees them."""
        times = self.chunk_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    def as_dict(self) -> dict[str, Any]:
        """For the file of raw records."""
        names = (
            "number", "conversation", "turn", "measured", "due_s", "sent_s", "end_s", "input_tokens_planned",
            "output_tokens_planned", "input_tokens", "cached_tokens", "output_tokens", "finish_reason",
            "ttft_s", "tpot_s", "e2e_s", "error", "error_detail", "attempts",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"chunk_times_s": list(self.chunk_times_s)}
