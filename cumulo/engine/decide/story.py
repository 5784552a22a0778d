"""Story: what happened to one request and why, recorded while it was decided. Written by the scheduler.

`LLM.generate` returns it, `--why` prints it; the numbers in it are the ones the decision used.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cumulo.spec.slo import ServedTimes, Slo, missed_bound

# What a request waits for. behind_others: its turn by order; fair_share: it is first in order, but others have been
# served less; prefill, transfer: another engine computes its prompt, its KV arrives; kv_fetch: it comes from disk.
WaitCause = Literal[
    "behind_others", "fair_share", "slots", "kv_blocks", "token_budget", "step_in_flight", "preempted", "prefill",
    "transfer", "kv_fetch",
]  # fmt: skip
# Who needed the room: an older sequence its next KV block, a more important request any, the first in the queue
# what beams held that waited for each other, or one whose tenant holds less than its share.
PreemptionCause = Literal["kv_blocks", "priority", "parked_beams", "fair_share"]
OutputLimit = Literal["max_tokens", "context", "KV cache"]  # what ends an answer that the model does not end
_MOST_EVENTS_WITH_WAITS = 200  # a longer story only counts the seconds of further waiting


class Event(NamedTuple):  # made five times for every request: a frozen dataclass takes four times as long
    time_s: float  # clock of the engine; only differences mean something
    kind: str
    detail: dict[str, Any]

    def describe(self) -> str:
        template = _WORDS.get(self.kind, self.kind)
        return template.format(**self.detail) if self.detail else template


_WORDS = {
    "routed": "sent to replica {replica}: {why}; expected TTFT {ttft_ms} ms; {instead}",
    "moved": "moved to replica {replica} because {because}: {why}; expected pause {ttft_ms} ms; {instead}",
    "arrived": "arrived with {prompt_tokens} prompt tokens, behind {behind} waiting requests",
    "embed": "asks for an embedding by {pooling} pooling: {wants}",
    "promised": "is promised {promise}: first token expected after {expected_ms:.0f} ms, behind {ahead} prompts",
    "not_promised": "is promised nothing and comes after those that are: {why}",
    "kept": "its promise was kept: TTFT {ttft_ms:.0f} ms, worst ITL {worst_itl_ms:.0f} ms",
    "missed_ttft": "its promise was not kept: TTFT {ttft_ms:.0f} ms",
    "missed_itl": "its promise was not kept: {late} of {tokens} tokens came later than the promised ITL, the worst "
    "after {worst_itl_ms:.0f} ms",
    "limited": "will end after {limit} output tokens, because {why}",
    "blocked": "waits for {why}",
    "admitted": "admitted to step {step}: {cached} of {tokens} tokens from the prefix cache",
    "fetched": "{tokens} tokens found {where}: fetched in {fetch_ms:.1f} ms instead of computing them in "
    "{compute_ms:.1f} ms",
    "not_fetched": "{tokens} tokens found on disk, but reading them would take {fetch_ms:.1f} ms and computing "
    "them {compute_ms:.1f} ms",
    "bad_files": "{files} files with KV blocks were damaged or missing: what they should hold is computed",
    "chunk": "step {step} computes {count} tokens from position {start}",
    "shared": "steps {step} to {last_step} compute {count} tokens from position {start}, a few in each: the steps' "
    "prompt budget is shared with other keys",
    "turns": "from step {step} on its samples take turns: steps are kept short for other keys",
    "forked": "{samples} samples share the computed prompt",
    "preempted": "preempted in step {step} by {by}, {why}: {blocks} blocks freed",
    "resumed": "resumed in step {step}: {recomputed} tokens to recompute, {cached} from the cache",
    "taken_over": "continues after {output_tokens} output tokens of an engine that stopped",
    "prefill_there": "{peer} computes {tokens} tokens of it, because {why}",
    "prefill_here": "its prompt is computed by the engine that answers: {why}",
    "prefill_begun": "{peer} begins, with {cached} tokens from its prefix cache",
    "receiving": "{blocks} KV blocks are copied from {peer} as they are computed; {held} tokens were here already",
    "received": "{blocks} KV blocks from {peer} are here, {tail_ms:.1f} ms after the last layer was computed",
    "prefill_failed": "{peer} does not deliver: {why}",
    "drafting": "from step {step} on tokens are drafted and verified together: {count} in this step, each expected "
    "to be right in {rate} of cases",
    "speculated": "{accepted} of {drafted} drafted tokens were accepted",
    "adapter": "answered with the adapter {name}, of rank {rank}",
    "first_token": "first token",
    "embedded": "its {tokens} tokens have become {size} numbers",
    "full": "the {what} is full",
    "finished": "sample {sample} finished: {reason} after {tokens} tokens",
    "failed": "failed: {error}",
}


Outcome = Literal["kept", "missed_ttft", "missed_itl"]


@dataclass(slots=True)
class Promise:
    """The TTFT and ITL that a request was promised, and what became of it."""

    ttft_s: float | None
    itl_s: float | None
    tokens: int = 0  # of its first sample, after the first one
    late_tokens: int = 0  # of these, that came later than itl_s after the one before
    worst_itl_s: float = 0.0
    last_token_s: float | None = None

    @staticmethod
    def from_slo(slo: Slo) -> "Promise":
        return Promise(slo.ttft_s, slo.itl_s)

    def note_token(self, now_s: float) -> None:
        if self.last_token_s is not None:
            waited_s = now_s - self.last_token_s
            self.tokens += 1
            self.worst_itl_s = max(self.worst_itl_s, waited_s)
            if self.itl_s is not None and waited_s > self.itl_s:
                self.late_tokens += 1
        self.last_token_s = now_s

    def outcome(self, ttft_s: float | None) -> Outcome:
        """`ttft_s`: as it was; None if it ended before its first token."""
        bounds = {"ttft": self.ttft_s, "itl": self.itl_s}
        promised = {name: bound_s for name, bound_s in bounds.items() if bound_s is not None}
        times = ServedTimes(ttft_s, gaps=self.tokens, late_gaps=self.late_tokens)
        missed = missed_bound(promised, times)
        if missed is None:
            return "kept"
        return "missed_ttft" if missed == "ttft" else "missed_itl"


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
    limited_by: OutputLimit = "max_tokens"
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of these
    took_turns: bool = False  # with other sequences of its tenant, for the sake of others
    waits_s: dict[str, float] = field(default_factory=dict)  # seconds waited, by WaitCause
    waits_for: str | None = "behind_others"  # the WaitCause of this moment; None while nothing of it waits
    waits_since_s: float | None = None  # None: since arrival
    events: list[Event] = field(default_factory=list)
    promise: Promise | None = None  # of an engine with an SLO

    def add(self, time_s: float, kind: str, **detail: Any) -> None:
        self.events.append(Event(time_s, kind, detail))

    # -- the events that also count something -------------------------------------------------------------
    def block(self, now_s: float, cause: WaitCause, why: str) -> None:
        """What one of the first in the queue waits for; a new line only when that changes in kind."""
        if self.waits_for == cause:
            return
        if self.waits_for != "preempted":  # one that gave way waits for that reason until it is back
            self.wait_for(now_s, cause)
        last = self.events[-1]
        news = last.kind != "blocked" or last.detail["cause"] != cause
        if news and len(self.events) < _MOST_EVENTS_WITH_WAITS:
            self.add(now_s, "blocked", cause=cause, why=why)

    def wait_for(self, now_s: float, cause: WaitCause | None) -> None:
        """The request waits for something else from now on, or (None) no more."""
        if self.waits_for is not None:
            since_s = self.arrived_s if self.waits_since_s is None else self.waits_since_s
            self.waits_s[self.waits_for] = self.waits_s.get(self.waits_for, 0.0) + now_s - since_s
        self.waits_for, self.waits_since_s = cause, now_s

    def note_token(self, now_s: float) -> None:
        """A token was drawn."""
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.add(now_s, "first_token")

    def note_drafts(self, now_s: float, step: int, count: int, rate: float) -> None:
        """Tokens were drafted, each of them right with this probability. Said once."""
        if not self.drafted_tokens:
            self.add(now_s, "drafting", step=step, count=count, rate=f"{rate:.0%}")
        self.drafted_tokens += count

    def chunk(self, now_s: float, step: int, start: int, count: int, cut: bool) -> None:
        """Prompt tokens are computed; `cut`: fewer than could be, because other tenants have a share of the step.
        Many such pieces are one event."""
        last = self.events[-1]
        if not cut:
            self.add(now_s, "chunk", step=step, start=start, count=count)
        elif last.kind == "shared" and last.detail["start"] + last.detail["count"] == start:
            last.detail.update(last_step=step, count=last.detail["count"] + count)
        else:
            self.add(now_s, "shared", step=step, last_step=step, start=start, count=count)

    def take_turns(self, now_s: float, step: int) -> None:
        """Not all of its sequences draw a token in this step. Said once."""
        if not self.took_turns:
            self.took_turns = True
            self.add(now_s, "turns", step=step)

    def finish(self, now_s: float, output_tokens: int) -> None:
        self.wait_for(now_s, None)
        self.finished_s, self.output_tokens = now_s, output_tokens
        if self.drafted_tokens:
            self.add(now_s, "speculated", accepted=self.accepted_tokens, drafted=self.drafted_tokens)

    def admit(self, now_s: float, step: int, tokens: int, cached: int, lost: int) -> None:
        """A sequence starts, or comes back after preemption with `lost` tokens to make up for."""
        self.wait_for(now_s, None)
        if self.admitted_s is None:
            # One that another engine began finds tokens of its answer, too.
            self.admitted_s, self.cached_tokens = now_s, min(cached, self.prompt_tokens)
            self.add(now_s, "admitted", step=step, cached=cached, tokens=tokens)
        else:
            recomputed = max(0, lost - cached)
            self.recomputed_tokens += recomputed
            self.add(now_s, "resumed", step=step, recomputed=recomputed, cached=cached)

    def preempt(
        self, now_s: float, step: int, cause: PreemptionCause, by: str, why: str, blocks: int
    ) -> None:
        """A sequence gives way: to whom (a request's id), and what for."""
        self.preemptions += 1
        self.wait_for(now_s, "preempted")
        self.add(now_s, "preempted", step=step, cause=cause, by=by, why=why, blocks=blocks)

    @property
    def length_words(self) -> str:
        """Why an answer ended that the model did not end."""
        return (
            "stopped at max_tokens" if self.limited_by == "max_tokens" else f"the {self.limited_by} is full"
        )

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
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "waits_s": dict(self.waits_s),
            "events": [
                {"at_s": e.time_s - self.arrived_s, "kind": e.kind, **e.detail, "words": e.describe()}
                for e in self.events
            ],
        }
