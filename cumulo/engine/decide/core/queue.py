"""WaitingQueue: the sequences that wait for room, first in order first. Owned by the scheduler's batch.

With API keys, sharing/queue.py takes its place, which gives tenants their turns.
"""

import heapq
from typing import Protocol

from cumulo.engine.decide.core.request import Sequence, State


class Queue(Protocol):
    @property
    def count(self) -> int:
        """Sequences that wait, queued or not (a beam waits for its fellows before it is queued)."""
        ...

    @property
    def level(self) -> int:
        """The priority whose turn it was when `first` was last asked."""
        ...

    def arrive(self, sequence: Sequence) -> None:
        """Queue a new request's first sequence."""
        ...

    def enter(self, sequence: Sequence) -> None:
        """Queue a sequence that did not wait until now."""
        ...

    def park(self, sequence: Sequence) -> None:
        """A sequence waits from now on, but is not queued."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Queue a waiting sequence that is not queued now."""
        ...

    def set_aside(self, sequence: Sequence) -> None:
        """A waiting sequence is not queued any more."""
        ...

    def take_first(self) -> None:
        """What `first` returned is admitted."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        ...

    def first(self) -> Sequence | None:
        """The request whose turn it is; None if nobody can be admitted."""
        ...


class WaitingQueue:
    def __init__(self) -> None:
        self.count = self.level = 0
        self._pushes = 0  # numbers entries, and breaks ties: samples of one request have the same order
        # Entries of sequences that are not queued any more are passed over when they come up.
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._stale = 0  # such entries

    def arrive(self, sequence: Sequence) -> None:
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        self.park(sequence)
        self.push(sequence)

    def park(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self.count += 1

    def push(self, sequence: Sequence) -> None:
        self._pushes += 1
        sequence.queued = self._pushes
        heapq.heappush(self._heap, (sequence.request.order, sequence.queued, sequence))

    def set_aside(self, sequence: Sequence) -> None:
        if sequence.queued:
            sequence.queued = 0
            self._stale += 1
            if self._stale > 64 and 2 * self._stale > len(self._heap):  # memory follows those who wait
                self._heap = [entry for entry in self._heap if entry[2].queued == entry[1]]
                heapq.heapify(self._heap)
                self._stale = 0

    def take_first(self) -> None:
        heapq.heappop(self._heap)[2].queued = 0
        self.count -= 1

    def leave(self, sequence: Sequence) -> None:
        self.count -= 1
        self.set_aside(sequence)

    def first(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][2].queued != heap[0][1]:
            heapq.heappop(heap)
            self._stale -= 1
        if not heap:
            return None
        self.level = heap[0][2].request.priority
        return heap[0][2]
