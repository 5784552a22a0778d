"""Story: what happened to one request and why, recorded while it was decided. Written by the scheduler.

`LLM.generate` returns it, `--why` prints it; the numbers in it are the ones the decision used.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    time_s: float  # clock of the engine; only differences mean something
    kind: str
    detail: dict[str, Any]

    def describe(self) -> str:
        template = _WORDS.get(self.kind, self.kind)
        return template.format(**self.detail) if self.detail else template


_WORDS = {
    "arrived": "arrived with {prompt_tokens} prompt tokens, behind {behind} waiting requests",
    "limited": "will end after {limit} output tokens, because {why}",
    "blocked": "waits for {why}",
    "admitted": "admitted to step {step}: {cached} of {tokens} tokens from the prefix cache",
    "chunk": "step {step} computes {count} tokens from position {start}",
    "forked": "{samples} samples share the computed prompt",
    "preempted": "preempted in step {step} by {by} to free {blocks} blocks; {how}",
    "resumed": "resumed in step {step} by {how}: {recomputed} tokens to recompute, {cached} from the cache",
    "first_token": "first token",
    "finished": "sample {sample} finished: {reason} after {tokens} tokens",
    "failed": "failed: {error}",
}


@dataclass(slots=True)
class Story:
    arrived_s: float
    prompt_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0  # of the prompt, at first admission
    recomputed_tokens: int = 0  # computed before, lost to preemption, computed again
    preemptions: int = 0
    output_tokens: int = 0
    events: list[Event] = field(default_factory=list)

    def add(self, time_s: float, kind: str, **detail: Any) -> None:
        self.events.append(Event(time_s, kind, detail))

    # -- the events that also count something -------------------------------------------------------------
    def block(self, now_s: float, why: str) -> None:
        """What the first in the queue waits for; a new line only when that changes in kind."""
        last = self.events[-1]
        if last.kind != "blocked" or last.detail["why"].rsplit(" ", 3)[1:] != why.rsplit(" ", 3)[1:]:
            self.add(now_s, "blocked", why=why)

    def admit(self, now_s: float, step: int, tokens: int, cached: int, lost: int, how: str) -> None:
        """A sequence starts, or comes back after preemption with `lost` tokens to make up for."""
        if self.admitted_s is None:
            self.admitted_s, self.cached_tokens = now_s, cached
            self.add(now_s, "admitted", step=step, cached=cached, tokens=tokens)
        else:
            recomputed = max(0, lost - cached)
            self.recomputed_tokens += recomputed
            self.add(now_s, "resumed", step=step, how=how, recomputed=recomputed, cached=cached)

    def preempt(self, now_s: float, step: int, by: str, blocks: int, how: str) -> None:
        self.preemptions += 1
        self.add(now_s, "preempted", step=step, by=by, blocks=blocks, how=how)

    @property
    def queue_s(self) -> float | None:
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def decode_tok_s(self) -> float | None:
        """Output tokens per second after the first one, all samples together."""
        if self.first_token_s is None or self.finished_s is None or self.output_tokens < 2:
            return None
        elapsed = self.finished_s - self.first_token_s
        return (self.output_tokens - 1) / elapsed if elapsed > 0 else None

    def describe(self) -> str:
        """The request's life, one line per event, times in milliseconds since arrival."""
        lines = [f"{(e.time_s - self.arrived_s) * 1e3:9.1f} ms  {e.describe()}" for e in self.events]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": self.queue_s,
            "ttft_s": self.ttft_s,
            "decode_tok_s": self.decode_tok_s,
            "cached_tokens": self.cached_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "preemptions": self.preemptions,
            "events": [
                {"at_s": e.time_s - self.arrived_s, "kind": e.kind, **e.detail, "words": e.describe()}
                for e in self.events
            ],
        }
