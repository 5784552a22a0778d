"""WaitingQueue: the sequences that wait for room, first in order first. Owned by the scheduler's batch.

With API keys, the TenantQueue of sharing/queue.py takes its place, which gives tenants their turns.
"""

import heapq

from cumulo.engine.decide.core.request import Sequence, State


class WaitingQueue:
    def __init__(self) -> None:
        # Sequences that wait, queued or not: a beam waits for its fellows before it is queued.
        self.count = 0
        self.level = 0  # the priority whose turn it was when `first` was last asked
        self._pushes = 0  # numbers entries, and breaks ties: samples of one request have the same order
        # Entries of sequences that are not queued any more are passed over when they come up.
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._stale = 0  # such entries

    def arrive(self, sequence: Sequence) -> None:
        """Queue a new request's first sequence."""
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Queue a sequence that did not wait until now."""
        self.park(sequence)
        self.push(sequence)

    def park(self, sequence: Sequence) -> None:
        """A sequence waits from now on, but is not queued."""
        sequence.state = State.WAITING
        self.count += 1

    def push(self, sequence: Sequence) -> None:
        """Queue a waiting sequence that is not queued now."""
        self._pushes += 1
        sequence.queued = self._pushes
        heapq.heappush(self._heap, (sequence.request.order, sequence.queued, sequence))

    def set_aside(self, sequence: Sequence) -> None:
        """A waiting sequence is not queued any more."""
        if sequence.queued:
            sequence.queued = 0
            self._stale += 1
            if self._stale > 64 and 2 * self._stale > len(self._heap):  # memory follows those who wait
                self._heap = [entry for entry in self._heap if entry[2].queued == entry[1]]
                heapq.heapify(self._heap)
                self._stale = 0

    def take_first(self) -> None:
        """What `first` returned is admitted."""
        heapq.heappop(self._heap)[2].queued = 0
        self.count -= 1

    def leave(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        self.count -= 1
        self.set_aside(sequence)

    def first(self) -> Sequence | None:
        """The sequence whose turn it is; None if nobody can be admitted."""
        heap = self._heap
        while heap and heap[0][2].queued != heap[0][1]:
            heapq.heappop(heap)
            self._stale -= 1
        if not heap:
            return None
        self.level = heap[0][2].request.priority
        return heap[0][2]
