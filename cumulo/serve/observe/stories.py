"""Stories: what is known of the last requests, for /v1/requests/{id}/explain, `cumulo explain` and the console.

The engine's Story says what was decided and why; a Record adds what the API process saw: when the request
came in, when its tokens left for the client. No text of prompts or answers is kept.
"""

import json
import statistics
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from cumulo.base.quantiles import percentile
from cumulo.engine.decide.routing import Route
from cumulo.engine.decide.story import Event, Story
from cumulo.serve.engine_link.in_flight import Dispatch

LAST = "last"  # what people call the newest request
_SHORTEST_NAME = 4  # characters; shorter beginnings name too many
_MOST_TOKEN_TIMES = 4096  # per request: the gaps of longer answers are judged by their beginning

# The engine's clock and this process's are the same one; this is where it stood at a known date.
_EPOCH_S = time.time() - time.perf_counter()


class NotUnique(ValueError):
    """Several calls have an id that begins like this."""


@dataclass(slots=True)
class Record:
    """All times are of the monotonic clock both processes share."""

    request_id: str
    call_id: str  # the HTTP request; a list of prompts makes several requests of one call
    caller: str
    model: str
    received_s: float  # by the API process
    submitted_s: float  # to the engine, after tokenising
    prompt_tokens: int
    samples: int
    stream: bool
    priority: int = 0
    resumed_tokens: int = 0  # of its answer, which another server had drawn before
    default_limit: int | None = None  # output tokens, where the server and not the client set the limit
    dispatches: list[Dispatch] = field(default_factory=list)  # where there are several replicas
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    retried: bool = False
    ended_s: float | None = None
    outcome: str | None = None  # stop, length, abort or error; None while it runs
    error: str | None = None
    story: Story | None = None

    def note_token(self, now_s: float) -> None:
        if len(self.token_times_s) < _MOST_TOKEN_TIMES:
            self.token_times_s.append(now_s)

    @property
    def first_token_s(self) -> float | None:
        """When the first token of its answer was drawn here, be it by an engine that another one has replaced;
        None: it was not, or another server has drawn it."""
        drawn_s = self.story.first_token_s if self.story is not None else None
        return None if drawn_s is None or self.resumed_tokens else min((drawn_s, *self.token_times_s[:1]))

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from when the server received the request: what /metrics counts, too."""
        return None if self.first_token_s is None else self.first_token_s - self.received_s

    @property
    def decode_tok_s(self) -> float | None:
        """Output tokens per second after the first one, all samples together."""
        story, first_s = self.story, self.first_token_s
        if story is None or first_s is None or story.finished_s is None or story.output_tokens < 2:
            return None
        elapsed_s = story.finished_s - first_s
        return (story.output_tokens - 1) / elapsed_s if elapsed_s > 0 else None

    @property
    def itls_s(self) -> list[float]:
        """Times between two tokens handed to the client; only a streamed single answer has them."""
        times = self.token_times_s if self.samples == 1 else ()
        return [later - earlier for earlier, later in pairwise(times)]


class Stories:
    """The last `capacity` requests by id, running ones included."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._by_call: dict[str, list[str]] = {}

    def add(self, record: Record) -> None:
        self._records[record.request_id] = record
        self._by_call.setdefault(record.call_id, []).append(record.request_id)
        while len(self._records) > self._capacity:
            _, oldest = self._records.popitem(last=False)
            siblings = self._by_call[oldest.call_id]
            siblings.remove(oldest.request_id)
            if not siblings:
                del self._by_call[oldest.call_id]

    def get(self, request_id: str) -> Record | None:
        return self._records.get(request_id)

    def of_call(self, call_or_request_id: str) -> list[Record]:
        """The records of a call, or the one of a single request."""
        names = self._by_call.get(call_or_request_id, [call_or_request_id])
        return [self._records[name] for name in names if name in self._records]

    def named(self, text: str, may_see: Callable[[str], bool]) -> list[Record]:
        """The records of a call by its id, or by the beginning of it that only one call has, with or without what
        stands before the random part: the console shows `3f2a91c0b7`, and `3f2a91c0b7-2` for one of several
        prompts; `last` is the newest. Only callers that `may_see` says are looked at. NotUnique if several calls
        begin like this."""
        if text == LAST:
            newest = (record for record in reversed(self._records.values()) if may_see(record.caller))
            text = next((record.call_id for record in newest), text)
        exact = [record for record in self.of_call(text) if may_see(record.caller)]
        if exact or len(text) < _SHORTEST_NAME:
            return exact
        found: dict[str, list[Record]] = {}
        for record in self._records.values():
            if may_see(record.caller) and _is_short_for(text, record.request_id):
                found.setdefault(record.call_id, []).append(record)
        if len(found) > 1:
            raise NotUnique(f"{len(found)} requests begin with {text!r}; give more of the id")
        return next(iter(found.values()), [])

    def recent(self, count: int) -> list[Record]:
        """The last ones, newest first."""
        return list(reversed(self._records.values()))[:count]


def _is_short_for(text: str, request_id: str) -> bool:
    """Whether `request_id` begins like this: `chatcmpl-3f2a`, `3f2a`, or `3f2a-2` where the call has several."""
    _, _, random = request_id.partition("-")
    if request_id.startswith(text) or random.startswith(text):
        return True
    whole, _, position = random.rpartition("-")
    beginning, _, wanted = text.rpartition("-")
    return (
        bool(position)
        and position == wanted
        and (beginning != "")
        and (whole.startswith(beginning) or request_id.startswith(beginning))
    )


def explanation(record: Record) -> dict[str, Any]:
    """A request's story in words and numbers; times in milliseconds since the server received it."""
    story = record.story
    itls_ms = sorted(itl_s * 1e3 for itl_s in record.itls_s)
    to_ms = _since(record.received_s)
    return {
        "id": record.request_id,
        "object": "request.explanation",
        "state": "running" if record.outcome is None else "finished",
        "finish_reason": record.outcome,
        "error": record.error,
        "model": record.model,
        "received_at": record.received_s + _EPOCH_S,
        "summary": summary(record),
        "times_ms": {
            "tokenised": to_ms(record.submitted_s),
            "queued": None if story is None or story.queue_s is None else story.queue_s * 1e3,
            "first_token": to_ms(record.first_token_s),
            "total": to_ms(record.ended_s),
            "gap_mean": statistics.fmean(itls_ms) if itls_ms else None,
            "gap_median": percentile(itls_ms, 0.5),
            "gap_p99": percentile(itls_ms, 0.99),
            "gap_max": itls_ms[-1] if itls_ms else None,
        },
        "tokens": {
            "prompt": record.prompt_tokens,
            "output": story.output_tokens if story else len(record.token_times_s),
            "cached": story.cached_tokens if story else None,
            "recomputed": story.recomputed_tokens if story else None,
            "drafted": story.drafted_tokens if story else None,
            "accepted": story.accepted_tokens if story else None,
        },
        "preemptions": story.preemptions if story else None,
        "retried_after_engine_restart": record.retried,
        "replicas": [dispatch.route.replica for dispatch in record.dispatches],
        "events": [
            {"at_ms": to_ms(event.time_s), "kind": event.kind, "words": event.describe(), **event.detail}
            for event in sorted(
                (*_decided_here(record), *(story.events if story else ())), key=lambda event: event.time_s
            )
        ],
    }


def _decided_here(record: Record) -> list[Event]:
    """What the API process decided: the default limit, and which replica gets the request."""
    events = []
    if record.default_limit is not None:
        why = "the request has no max_tokens and this is the server's --default-max-tokens"
        events.append(Event(record.submitted_s, "limited", {"limit": record.default_limit, "why": why}))
    for dispatch in record.dispatches:
        detail: dict[str, Any] = route_words(dispatch.route)
        if dispatch.moved_because:
            detail["because"] = dispatch.moved_because
        events.append(Event(dispatch.time_s, "moved" if dispatch.moved_because else "routed", detail))
    return events


def route_words(route: Route) -> dict[str, Any]:
    """A routing decision as data and as words."""
    second = route.second
    return {
        "replica": route.replica,
        "why": route.why,
        "ttft_ms": round(route.ttft_s * 1e3, 1),
        "cached_tokens": route.cached_tokens,
        "second": None
        if second is None
        else {
            "replica": second.replica,
            "ttft_ms": round(second.ttft_s * 1e3, 1),
            "cached_tokens": second.cached_tokens,
        },
        "instead": "no other replica could take it"
        if second is None
        else f"the second choice, {second.replica}, would have taken {second.ttft_s * 1e3:.1f} ms with "
        f"{second.cached_tokens:,} tokens cached",
    }


def summary(record: Record) -> str:
    """Tell a request's story in one paragraph that a person can read at 3 a.m."""
    story = record.story
    if story is None:
        if record.outcome is None:
            seen = f"{len(record.token_times_s)} tokens streamed so far" if record.stream else "no answer yet"
            return f"Still running for {(time.perf_counter() - record.received_s) * 1e3:.0f} ms; {seen}."
        return f"Ended without an answer: {record.error or record.outcome}."
    parts = [
        f"{record.prompt_tokens} prompt tokens, tokenized in {_ms(record.submitted_s - record.received_s)}"
    ]
    behind = next((event.detail.get("behind", 0) for event in story.events if event.kind == "arrived"), 0)
    if story.queue_s is not None:
        others = f" behind {behind} request{'' if behind == 1 else 's'}" if behind else ""
        parts.append(f"queued {_ms(story.queue_s)}{others}")
    reasons = list(dict.fromkeys(e.detail["why"] for e in story.events if e.kind == "blocked"))
    if reasons:
        parts.append("waited for " + "; then for ".join(reasons[:3]))
    parts.append(f"prefix cache hit {story.cached_tokens} of {record.prompt_tokens} tokens")
    for event in story.events:
        if event.kind == "preempted":
            parts.append(
                f"preempted in step {event.detail['step']} by {event.detail['by']}, {event.detail['why']}"
            )
    if story.drafted_tokens:
        parts.append(f"{story.accepted_tokens} of {story.drafted_tokens} drafted tokens accepted")
    if story.recomputed_tokens:
        parts.append(f"{story.recomputed_tokens} tokens recomputed")
    if record.dispatches:
        route = record.dispatches[0].route
        parts.append(f"sent to replica {route.replica} ({route.why})")
    for dispatch in record.dispatches[1:]:
        parts.append(f"moved to {dispatch.route.replica} because {dispatch.moved_because}")
    if record.retried and not record.dispatches:
        parts.append("the engine was restarted meanwhile and the request submitted again")
    if record.resumed_tokens:
        parts.append(f"continued after {record.resumed_tokens} tokens that another server had drawn")
    if record.ttft_s is not None:
        parts.append(f"first token after {_ms(record.ttft_s)}")
    if record.decode_tok_s is not None:
        parts.append(f"then {record.decode_tok_s:.1f} tokens/s")
    itls_ms = sorted(itl_s * 1e3 for itl_s in record.itls_s)
    if itls_ms:
        parts.append(f"ITL median {percentile(itls_ms, 0.5):.1f} ms, longest {itls_ms[-1]:.1f} ms")
    if any(event.kind == "embedded" for event in story.events):
        parts.append("ended with its embedding")
    else:
        how = story.length_words if record.outcome == "length" else _ENDS.get(record.outcome or "")
        parts.append(f"{how or f'ended by {record.outcome}'} after {story.output_tokens} tokens")
        if record.outcome == "length" and record.default_limit is not None:
            parts.append("the server's default, because the request has no max_tokens")
    if record.ended_s is not None:
        parts.append(f"{_ms(record.ended_s - record.received_s)} in all")
    return "; ".join(parts) + "."


_ENDS = {
    "stop": "the model ended its answer",
    "abort": "aborted by the client",
    "error": "failed",
}


def _since(origin_s: float) -> Any:
    return lambda time_s: None if time_s is None else round((time_s - origin_s) * 1e3, 3)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


MOST_REASON_BYTES = 4096  # of the answer that refused it


@dataclass(frozen=True, slots=True)
class Rejection:
    received_s: float  # monotonic clock
    took_s: float
    path: str
    status: int
    caller: str | None  # None: nobody knows; no valid key was sent
    answer: bytes  # as the client got it, its beginning

    @property
    def reason(self) -> str:
        """Read only where somebody looks: many refusals a second must cost little."""
        try:
            return str(json.loads(self.answer)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return self.answer.decode("utf-8", "replace")[:200] or f"status {self.status}"


class Rejections:
    """The last calls that were refused before they reached the engine: they have no story. Of the request nothing
    is kept but what the client was told. Callers without a key cannot push out those of callers with one."""

    def __init__(self, capacity: int) -> None:
        self._of_callers: deque[Rejection] = deque(maxlen=capacity)
        self._without_key: deque[Rejection] = deque(maxlen=min(capacity, 200))

    def note(self, rejection: Rejection) -> None:
        (self._without_key if rejection.caller is None else self._of_callers).append(rejection)

    def recent(self) -> list[Rejection]:
        """The last ones, newest first."""
        both = chain(self._of_callers, self._without_key)
        return sorted(both, key=lambda one: one.received_s, reverse=True)
