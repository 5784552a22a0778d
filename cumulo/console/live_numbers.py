"""The live page's numbers, from what the service keeps anyway: the history of steps and recent requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cumulo.base.quantiles import percentile
from cumulo.console.machine_use import UseSample
from cumulo.serve.observe.step_history import Slice, StepHistory
from cumulo.serve.observe.stories import Record

JUDGED_S = 300.0  # percentiles are of requests not older than this
_RATE_S = 5  # the present rate is the mean of so many seconds
_MOST_GAPS = 256  # per request


@dataclass(frozen=True, slots=True)
class Window:
    """How much of the past a chart shows, and in how many slices of how many seconds."""

    label: str
    slices: int
    slice_s: float

    @property
    def length_s(self) -> float:
        return self.slices * self.slice_s


WINDOWS = (Window("1 min", 60, 1), Window("10 min", 60, 10), Window("1 hour", 120, 30))


def slices(history: StepHistory, window: Window, now_s: float) -> list[Slice]:
    if window.slice_s < history.tens.width_s:
        return history.seconds.last(now_s, window.slices)
    return history.tens.last(now_s, window.slices, int(window.slice_s / history.tens.width_s))


def rates(history: StepHistory, now_s: float) -> tuple[float, float]:
    """Prefill and decode tokens per second just now."""
    last = history.seconds.last(now_s, _RATE_S)
    return (
        sum(part.prefill_tokens for part in last) / _RATE_S,
        sum(part.decode_tokens for part in last) / _RATE_S,
    )


def machine_line(
    samples: Sequence[UseSample], values: Sequence[float | None], window: Window, now_s: float
) -> list[float | None]:
    """One value per slice of a window: the last sample in it; where a slice has none, the one before goes on."""
    points: list[float | None] = [None] * window.slices
    start_s = now_s - window.length_s
    for sample, value in zip(samples, values, strict=True):
        index = int((sample.time_s - start_s) / window.slice_s)
        if 0 <= index < window.slices:
            points[index] = value
    for index in range(1, window.slices):
        if points[index] is None:
            points[index] = points[index - 1]
    return points


@dataclass(frozen=True, slots=True)
class Latencies:
    requests: int
    first_p50_s: float | None
    first_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    preemptions: int


def latencies(records: Iterable[Record], now_s: float) -> Latencies:
    """The latencies of the requests that were received within the last minutes."""
    firsts: list[float] = []
    gaps: list[float] = []
    count = preemptions = 0
    for record in records:
        if record.received_s < now_s - JUDGED_S:
            continue
        count += 1
        if record.story is not None:
            preemptions += record.story.preemptions
            if record.ttft_s is not None:
                firsts.append(record.ttft_s)
        if record.samples == 1:
            times = record.token_times_s[-_MOST_GAPS:]
            gaps.extend(later - earlier for earlier, later in pairwise(times))
    return Latencies(
        count,
        percentile(firsts, 0.5),
        percentile(firsts, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        preemptions,
    )
