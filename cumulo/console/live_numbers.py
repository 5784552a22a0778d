"""The live page's numbers, from what the service keeps anyway: recent steps and recent requests."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from cumulo.console.words import percentile
from cumulo.serve.messages import StepRecord
from cumulo.serve.stories import Record

WINDOW_S = 60  # what the throughput chart shows
_JUDGED_S = 300.0  # percentiles are of requests not older than this
_RATE_S = 5  # the present rate is the mean of so many seconds
_MOST_GAPS = 256  # per request


@dataclass(slots=True)
class Throughput:
    """Tokens per second, second by second. Fed with the same growing list of steps, again and again."""

    seconds: dict[int, tuple[int, int]] = field(default_factory=dict)  # prefill and decode tokens
    _seen_s: float = 0.0  # when the last step taken in finished

    def take(self, steps: Iterable[StepRecord], now_s: float) -> None:
        newest_s = self._seen_s
        for step in steps:
            if step.finished_s > self._seen_s:
                newest_s = max(newest_s, step.finished_s)
                prefill, decode = self.seconds.get(int(step.finished_s), (0, 0))
                self.seconds[int(step.finished_s)] = (
                    prefill + step.prefill_tokens,
                    decode + step.decode_tokens,
                )
        self._seen_s = newest_s
        for second in [second for second in self.seconds if second < int(now_s) - WINDOW_S]:
            del self.seconds[second]

    def history(self, now_s: float) -> list[tuple[int, int]]:
        """One pair per second of the window, the present one left out: it is not over."""
        return [self.seconds.get(second, (0, 0)) for second in range(int(now_s) - WINDOW_S, int(now_s))]

    def rate(self, now_s: float) -> tuple[float, float]:
        """Prefill and decode tokens per second just now."""
        last = self.history(now_s)[-_RATE_S:]
        return sum(prefill for prefill, _ in last) / _RATE_S, sum(decode for _, decode in last) / _RATE_S


@dataclass(frozen=True, slots=True)
class Latencies:
    requests: int
    first_p50_s: float | None
    first_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None


def latencies(records: Iterable[Record], now_s: float) -> Latencies:
    """Of the requests that were received within the last minutes."""
    firsts: list[float] = []
    gaps: list[float] = []
    count = 0
    for record in records:
        if record.received_s < now_s - _JUDGED_S:
            continue
        count += 1
        if record.story is not None and record.story.ttft_s is not None:
            firsts.append(record.story.ttft_s)
        if record.samples == 1:
            times = record.token_times_s[-_MOST_GAPS:]
            gaps.extend(later - earlier for earlier, later in pairwise(times))
    return Latencies(
        count,
        percentile(firsts, 0.5),
        percentile(firsts, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
    )
