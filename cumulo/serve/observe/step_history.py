"""StepHistory: what the engine did in the last minutes and the last hour, in few numbers. Fed by Service.

A minute second by second and an hour in slices of ten seconds: 480 slices in all, whatever the engine's speed.
"""

from collections import OrderedDict
from dataclasses import dataclass

from cumulo.serve.engine_link.messages import Stats


@dataclass(slots=True)
class Slice:
    """What happened within one slice of time."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0  # spent in steps
    running: int = 0  # most sequences at a time
    waiting: int = 0
    blocks_used: int = 0

    def add(self, other: "Slice") -> None:
        self.prefill_tokens += other.prefill_tokens
        self.decode_tokens += other.decode_tokens
        self.steps += other.steps
        self.busy_s += other.busy_s
        self.running = max(self.running, other.running)
        self.waiting = max(self.waiting, other.waiting)
        self.blocks_used = max(self.blocks_used, other.blocks_used)


class StepSeries:
    """Slices of one width, the last `count` of them."""

    def __init__(self, width_s: float, count: int) -> None:
        self.width_s, self.count = width_s, count
        self._slices: OrderedDict[int, Slice] = OrderedDict()

    def slice_at(self, time_s: float) -> Slice:
        number = int(time_s // self.width_s)
        found = self._slices.get(number)
        if found is None:
            found = self._slices[number] = Slice()
            while len(self._slices) > self.count + 1:
                self._slices.popitem(last=False)
        return found

    def last(self, now_s: float, count: int, per_slice: int = 1) -> list[Slice]:
        """The last `count` slices, oldest first, each made of `per_slice` of ours. The present one is left out: it
        is not over."""
        end = int(now_s // self.width_s)
        merged = []
        for position in range(count):
            first = end - (count - position) * per_slice
            whole = Slice()
            for number in range(first, first + per_slice):
                if number in self._slices:
                    whole.add(self._slices[number])
            merged.append(whole)
        return merged


class StepHistory:
    def __init__(self) -> None:
        self.seconds = StepSeries(1.0, 120)
        self.tens = StepSeries(10.0, 360)

    def note(self, stats: Stats, now_s: float) -> None:
        for series in (self.seconds, self.tens):
            for record in stats.records:
                part = series.slice_at(record.finished_s)
                part.prefill_tokens += record.prefill_tokens
                part.decode_tokens += record.decode_tokens
                part.steps += 1
                part.busy_s += record.finished_s - record.started_s
            part = series.slice_at(now_s)
            part.running = max(part.running, stats.running)
            part.waiting = max(part.waiting, stats.waiting)
            part.blocks_used = max(part.blocks_used, stats.blocks_used)
