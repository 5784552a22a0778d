"""WaitingQueue: sequences that wait for room, first in order first. Owned by the scheduler.

A heap that never searches: entries of sequences that have ended are passed over when they come up, so that
adding, aborting and looking at the first cost the same with ten waiting as with a hundred thousand.
"""

import heapq

from cumulo.engine.request import Sequence, State


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._pushes = 0  # breaks ties: samples of one request have the same order
        self.count = 0  # sequences that wait, queued or (beams waiting for their fellows) not

    def enter(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self.count += 1
        self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        """Queue a waiting sequence that is not queued now."""
        if len(self._heap) > 64 and len(self._heap) > 2 * self.count:
            # Mostly entries of ended sequences: drop them, so that memory follows the live ones.
            self._heap = [entry for entry in self._heap if entry[2].state == State.WAITING]
            heapq.heapify(self._heap)
        self._pushes += 1
        heapq.heappush(self._heap, (sequence.request.order, self._pushes, sequence))

    def first(self) -> Sequence | None:
        """The first that can be admitted. A beam with candidates has been computed: it waits for its fellows
        and is queued again when it gets its next token."""
        heap = self._heap
        while heap and (heap[0][2].state != State.WAITING or heap[0][2].candidates is not None):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def take_first(self) -> None:
        """What `first` returned is admitted."""
        heapq.heappop(self._heap)
        self.count -= 1

    def leave(self) -> None:
        """A waiting sequence ended; its entry goes when it comes up."""
        self.count -= 1
