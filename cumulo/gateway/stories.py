"""Stories of the gateway: where the last requests went and why, what failed, and who continued. For /explain.

No text of prompts or answers is kept.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from cumulo.engine.decide.routing import Route
from cumulo.fleet.wire import FleetCaller

_EPOCH_S = time.time() - time.perf_counter()
_MOST_EVENTS = 64
_SHORTEST_NAME = 4


@dataclass(slots=True)
class ProxiedRecord:
    """One request. Times are of this process's monotonic clock."""

    id: str
    owner: str
    fleet_caller: FleetCaller | None
    path: str
    model: str | None
    stream: bool
    received_s: float
    call_id: str = ""  # as the client knows it; told by the replica
    events: list[dict[str, Any]] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)  # that answered, in order
    moves: int = 0
    status: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    first_sent_s: float | None = None
    last_sent_s: float | None = None
    longest_pause_s: float = 0.0
    ended_s: float | None = None
    error: str | None = None

    # -- what happens -------------------------------------------------------------------------------------
    def _add(self, now_s: float, kind: str, words: str, **detail: Any) -> None:
        if len(self.events) < _MOST_EVENTS:
            at_ms = round((now_s - self.received_s) * 1e3, 3)
            self.events.append({"at_ms": at_ms, "kind": kind, "words": words, **detail})

    def note_choice(self, route: Route, now_s: float) -> None:
        second = route.second
        words = (
            f"gateway: sent to {route.replica}: {route.why}; {route.cached_tokens:,} tokens expected in its cache, "
            f"TTFT expected {route.ttft_s * 1e3:.1f} ms"
        )
        if second is not None:
            words += (
                f"; the second choice was {second.replica}, with {second.cached_tokens:,} cached tokens and "
                f"{second.ttft_s * 1e3:.1f} ms"
            )
        self._add(now_s, "routed", words, replica=route.replica, why=route.why, expected_ttft_ms=route.ttft_s * 1e3,
                  expected_cached_tokens=route.cached_tokens, second=None if second is None else {
                      "replica": second.replica, "expected_ttft_ms": second.ttft_s * 1e3,
                      "expected_cached_tokens": second.cached_tokens})  # fmt: skip

    def note_failure(self, replica: str, reason: str, tokens: int, now_s: float) -> None:
        self.moves += 1
        after = f" after {tokens:,} tokens, which the client has" if tokens else ""
        self._add(
            now_s,
            "lost",
            f"gateway: {replica} {reason}{after}",
            replica=replica,
            reason=reason,
            tokens=tokens,
        )

    def note_refusal(self, replica: str, status: int, now_s: float) -> None:
        self._add(now_s, "refused", f"gateway: {replica} answered {status}", replica=replica, status=status)

    def note_answer(self, replica: str, status: int, call_id: str) -> None:
        self.status, self.call_id = status, call_id or self.call_id
        if not self.replicas or self.replicas[-1] != replica:
            self.replicas.append(replica)

    def note_prompt(self, tokens: int, cached: int | None) -> None:
        self.prompt_tokens = tokens
        if cached is not None:
            self.cached_tokens = cached

    def note_sent(self, now_s: float) -> None:
        """A piece of the answer goes to the client."""
        if self.last_sent_s is None:
            self.first_sent_s = now_s
        elif now_s - self.last_sent_s > self.longest_pause_s:
            self.longest_pause_s = now_s - self.last_sent_s
        self.last_sent_s = now_s

    def note_end(self, output_tokens: int | None, cached_tokens: int | None, now_s: float) -> None:
        self.ended_s, self.output_tokens = now_s, output_tokens
        if cached_tokens is not None and not self.moves:  # a continued answer finds its own tokens, too
            self.cached_tokens = cached_tokens

    def note_error(self, reason: str, now_s: float) -> None:
        self.ended_s, self.error = now_s, reason
        self._add(now_s, "failed", f"gateway: gave up: {reason}")

    # -- telling ------------------------------------------------------------------------------------------
    def summary(self) -> str:
        first = next((event for event in self.events if event["kind"] == "routed"), None)
        parts = [f"sent to {first['replica']}: {first['why']}" if first is not None else "sent to no replica"]
        if first is not None and self.cached_tokens is not None:
            parts.append(
                f"{self.cached_tokens:,} of {self.prompt_tokens or 0:,} prompt tokens were cached there, "
                f"{first['expected_cached_tokens']:,} expected"
            )
        if self.moves:
            parts.append(
                f"moved {self.moves} times; continued by {self.replicas[-1] if self.replicas else 'nobody'}"
            )
        if self.first_sent_s is not None:
            parts.append(f"first byte after {(self.first_sent_s - self.received_s) * 1e3:.1f} ms")
        if self.stream and self.longest_pause_s:
            parts.append(f"longest pause {self.longest_pause_s * 1e3:.1f} ms")
        if self.error is not None:
            parts.append(f"failed: {self.error}")
        return "; ".join(parts) + "."

    def explanation(self) -> dict[str, Any]:
        ended_ms = None if self.ended_s is None else (self.ended_s - self.received_s) * 1e3
        first_ms = None if self.first_sent_s is None else (self.first_sent_s - self.received_s) * 1e3
        return {
            "id": self.call_id or self.id,
            "object": "request.routing",
            "path": self.path,
            "model": self.model,
            "received_at": self.received_s + _EPOCH_S,
            "replicas": self.replicas,
            "moves": self.moves,
            "summary": self.summary(),
            "times_ms": {
                "first_byte": first_ms,
                "total": ended_ms,
                "longest_pause": self.longest_pause_s * 1e3,
            },
            "tokens": {
                "prompt": self.prompt_tokens,
                "output": self.output_tokens,
                "cached": self.cached_tokens,
            },
            "events": self.events,
        }


class GatewayStories:
    """The last `capacity` requests, running ones included."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._records: OrderedDict[str, ProxiedRecord] = OrderedDict()

    def add(self, record: ProxiedRecord) -> None:
        self._records[record.id] = record
        if len(self._records) > self.capacity:
            self._records.popitem(last=False)

    def named(self, text: str, owner: str | None) -> ProxiedRecord | None:
        """By the answer's id, the random part of it or a beginning that is long enough; `last` is the newest. The
        newest of several. `owner`: whose; None: anybody's."""
        random = text.partition("-")[2] or text.rpartition("_")[2]
        found = self._records.get(random)
        if found is not None and owner in (None, found.owner):
            return found
        for record in self.recent(self.capacity, owner):
            if text == "last" or (len(random) >= _SHORTEST_NAME and record.id.startswith(random)):
                return record
        return None

    def recent(self, count: int, owner: str | None) -> list[ProxiedRecord]:
        """The newest first."""
        whose = (one for one in reversed(self._records.values()) if owner in (None, one.owner))
        return list(islice(whose, count))
