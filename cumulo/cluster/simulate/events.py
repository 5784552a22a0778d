"""What happens while a trace is played, moment by moment. Arrivals are known beforehand and kept apart, so that the
heap holds only what comes of the jobs that run."""

import heapq
from collections.abc import Sequence
from typing import Literal

from cumulo.cluster.simulate.job_speed import TraceJob

EventKind = Literal["arrive", "advance", "fail", "repair", "decide"]
# When, which of its moment, what, the job or node, and a number for whoever handles it.
Event = tuple[float, int, EventKind, str, int]


class Events:
    """Of one moment, first the arrivals in the order of the trace, then the others in the order in which they were
    pushed."""

    def __init__(self, trace: Sequence[TraceJob]) -> None:
        arrivals: list[Event] = [
            (job.request.arrival_s, number, "arrive", job.request.job_id, number)
            for number, job in enumerate(trace)
        ]
        self._arrivals = sorted(arrivals, reverse=True)  # the next one is the last
        self._heap: list[Event] = []
        self._pushed = 0

    def push(self, at_s: float, kind: EventKind, name: str, number: int = 0) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at_s, self._pushed, kind, name, number))

    def next_s(self) -> float | None:
        """The next moment at which something happens; None: nothing will."""
        if self._arrivals and (not self._heap or self._arrivals[-1][0] <= self._heap[0][0]):
            return self._arrivals[-1][0]
        return self._heap[0][0] if self._heap else None

    def pop(self, now_s: float) -> Event | None:
        """The next event of this moment, if there is one."""
        if self._arrivals and self._arrivals[-1][0] == now_s:
            return self._arrivals.pop()
        return heapq.heappop(self._heap) if self._heap and self._heap[0][0] == now_s else None

    def may_start_jobs(self) -> bool:
        """Whether a job will arrive or a node be repaired."""
        return bool(self._arrivals) or any(kind == "repair" for _, _, kind, _, _ in self._heap)
