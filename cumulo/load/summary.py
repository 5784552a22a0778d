"""A level's figures from its records: latencies, throughput, goodput, errors. Pure; read by every report."""

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from cumulo.base.quantiles import quantile
from cumulo.spec.slo import Slo


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


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles with linear interpolation (base/quantiles.py)."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Spread | None":
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p95, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
        return cls(len(ordered), statistics.fmean(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of the measured requests of one level; warm-up is excluded everywhere.

    The window runs from when the first measured request was due to when the last one ended. All tokens
    that arrived inside it count for throughput, those of warm-up requests still running too: the server
    worked on them then.
    """

    requests: int
    succeeded: int
    errors: dict[str, int]
    window_s: float
    ttft_s: Spread | None
    itl_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    lateness_s: Spread | None  # how late the generator sent
    offered_req_s: float  # arrivals over the time in which they arrived
    completed_req_s: float
    output_tok_s: float
    input_tok_s: float
    mean_input_tokens: float | None
    mean_output_tokens: float | None
    cached_share: float | None  # of the prompt tokens, where the server tells
    tokens_per_chunk: float | None
    slo_met: int | None
    slo_share: float | None
    goodput_req_s: float | None
    goodput_tok_s: float | None

    @property
    def spreads(self) -> dict[str, Spread | None]:
        """The latencies, by what people call them."""
        return {
            "TTFT": self.ttft_s, "ITL": self.itl_s, "TPOT": self.tpot_s, "end-to-end latency": self.e2e_s,
        }  # fmt: skip


def summarise(records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
    """Requests the user stopped are left out: they neither succeeded nor failed."""
    measured = [record for record in records if record.measured and record.error != "stopped"]
    good = [record for record in measured if record.error is None]
    start_s = min((record.due_s for record in measured), default=0.0)
    window_s = max((record.end_s for record in measured), default=0.0) - start_s
    arriving_s = max((record.due_s for record in measured), default=0.0) - start_s
    met = None if slo is None else [record for record in good if slo.met_by(record)]
    input_counts = [record.input_tokens for record in good if record.input_tokens is not None]
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    chunks = sum(len(record.chunk_times_s) for record in good)

    def rate(amount: float) -> float:
        return amount / window_s if window_s > 0 else 0.0

    return Summary(
        requests=len(measured),
        succeeded=len(good),
        errors=dict(Counter(record.error for record in measured if record.error).most_common()),
        window_s=window_s,
        ttft_s=Spread.from_values([record.ttft_s for record in good if record.ttft_s is not None]),
        itl_s=Spread.from_values([itl_s for record in good for itl_s in record.itls_s]),
        tpot_s=Spread.from_values([record.tpot_s for record in good if record.tpot_s is not None]),
        e2e_s=Spread.from_values([record.e2e_s for record in good]),
        lateness_s=Spread.from_values([record.lateness_s for record in measured]),
        # n arrivals have n − 1 intervals between them
        offered_req_s=(len(measured) - 1) / arriving_s if arriving_s > 0 else 0.0,
        completed_req_s=rate(len(good)),
        output_tok_s=rate(tokens_between(records, start_s, start_s + window_s)),
        input_tok_s=rate(sum(input_counts)),
        mean_input_tokens=sum(input_counts) / len(input_counts) if input_counts else None,
        mean_output_tokens=sum(record.output_tokens for record in good) / len(good) if good else None,
        cached_share=sum(cached) / max(1, sum(input_counts)) if cached else None,
        tokens_per_chunk=sum(record.output_tokens for record in good) / chunks if chunks else None,
        slo_met=None if met is None else len(met),
        slo_share=None if met is None or not measured else len(met) / len(measured),
        goodput_req_s=None if met is None else rate(len(met)),
        goodput_tok_s=None if met is None else rate(sum(record.output_tokens for record in met)),
    )


def tokens_between(records: Sequence[RequestRecord], start_s: float, end_s: float) -> float:
    """Tokens that arrived in a stretch of time; a request's tokens are spread evenly over its chunks."""
    total = 0.0
    for record in records:
        times = record.chunk_times_s
        if not times:
            continue
        if start_s <= times[0] and times[-1] <= end_s:
            total += record.output_tokens
        else:
            inside = sum(start_s <= time_s <= end_s for time_s in times)
            total += record.output_tokens * inside / len(times)
    return total


@dataclass(frozen=True, slots=True)
class LoadTimeline:
    """What happened second by second, for plots: one entry per stretch of `step_s`."""

    step_s: float
    output_tok_s: list[float]
    running: list[int]  # requests under way at the end of the stretch


def timeline(records: Sequence[RequestRecord], stretches: int = 120) -> LoadTimeline:
    """The whole level, warm-up included, in at most so many stretches of at least half a second."""
    end_s = max((record.end_s for record in records), default=0.0)
    step_s = max(0.5, end_s / stretches)
    count = max(1, math.ceil(end_s / step_s))
    tokens, change = [0.0] * count, [0] * (count + 1)

    def place(time_s: float, last: int) -> int:
        return min(int(max(time_s, 0.0) / step_s), last)

    for record in records:
        for time_s in record.chunk_times_s:
            tokens[place(time_s, count - 1)] += record.output_tokens / len(record.chunk_times_s)
        change[place(record.sent_s, count)] += 1
        change[place(record.end_s, count)] -= 1
    return LoadTimeline(step_s, [one / step_s for one in tokens], list(accumulate(change[:count])))
