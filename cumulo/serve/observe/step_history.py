"""StepHistory: what the engine did in the last hour, in few numbers whatever its speed. Fed by Service, for the
console.
"""

from collections import OrderedDict
from dataclasses import dataclass

from cumulo.serve.engine_link.messages import Stats

_KEPT_S = 3660  # an hour, and what has begun of the next slice


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


class StepHistory:
    """An hour, second by second. Wider slices begin at multiples of their width, so that they stay as they are."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[int, Slice] = OrderedDict()

    def note(self, stats: Stats, now_s: float) -> None:
        for record in stats.records:
            part = self._second_of(record.finished_s)
            part.prefill_tokens += record.prefill_tokens
            part.decode_tokens += record.decode_tokens
            part.steps += 1
            part.busy_s += record.finished_s - record.started_s
        seen = Slice(running=stats.running, waiting=stats.waiting, blocks_used=stats.blocks_used)
        self._second_of(now_s).add(seen)

    def _second_of(self, time_s: float) -> Slice:
        found = self._seconds.get(int(time_s))
        if found is None:
            found = self._seconds[int(time_s)] = Slice()
            while len(self._seconds) > _KEPT_S:
                self._seconds.popitem(last=False)
        return found

    def last(self, now_s: float, count: int, width_s: int = 1) -> list[Slice]:
        """The last `count` slices of this width, oldest first. The present one is left out: it is not over."""
        end = int(now_s // width_s)
        merged = []
        for number in range(end - count, end):
            whole = Slice()
            for second in range(number * width_s, (number + 1) * width_s):
                if second in self._seconds:
                    whole.add(self._seconds[second])
            merged.append(whole)
        return merged
