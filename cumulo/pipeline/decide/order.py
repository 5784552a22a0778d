"""StageOrder: a pen for generators. It writes a stage's actions and hands out micro-batches in turn."""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from cumulo.pipeline.decide.actions import Action, Kind

# Actions are plain values and schedules have many alike: making one takes ten times as long as finding it.
_action = lru_cache(1 << 16)(Action)


class StageOrder:
    """Appends actions for numbered *lanes*: the chunks of one stage, each with the micro-batches that pass it.

    Every schedule here takes the micro-batches of a lane in rising order, so a generator only says "the next
    forward of lane 1". What it asks for beyond the last micro-batch is left out: a schedule written for many
    micro-batches stays right for few.
    """

    def __init__(self, lanes: Sequence[tuple[int, int, Iterable[int]]]) -> None:
        """`lanes`: (chunk, direction, micro-batches) of each."""
        self.actions: list[Action] = []
        self._lanes = [(chunk, direction, tuple(batches)) for chunk, direction, batches in lanes]
        self._forwards = [0] * len(lanes)
        self._backwards = [0] * len(lanes)
        self._owed: deque[tuple[int, int]] = deque()  # weight gradients put off: (lane, turn), oldest first

    def forward(self, lane: int, times: int = 1) -> None:
        for _ in range(times):
            self._write(Kind.FORWARD, lane, self._forwards[lane])
            self._forwards[lane] += 1

    def backward(self, lane: int, times: int = 1) -> None:
        """Input and weight gradients in one."""
        for _ in range(times):
            self._write(Kind.BACKWARD, lane, self._backwards[lane])
            self._backwards[lane] += 1

    def backward_input(self, lane: int, times: int = 1) -> None:
        """The input gradient now; the weight gradient is owed."""
        for _ in range(times):
            self._write(Kind.BACKWARD_INPUT, lane, self._backwards[lane])
            self._owed.append((lane, self._backwards[lane]))
            self._backwards[lane] += 1

    def weight(self, lane: int | None = None) -> None:
        """The weight gradient owed longest, by one lane or by any; nothing where none is owed."""
        for position, (owing, turn) in enumerate(self._owed):
            if lane is None or owing == lane:
                del self._owed[position]
                self._write(Kind.BACKWARD_WEIGHT, owing, turn)
                return

    def overlapped(self, forward_lane: int, backward_lane: int) -> None:
        """A forward and a backward at the same time."""
        written = len(self.actions)
        self.forward(forward_lane)
        backward_follows = self._backwards[backward_lane] < len(self._lanes[backward_lane][2])
        if len(self.actions) > written and backward_follows:
            last = self.actions[-1]
            self.actions[-1] = _action(last.kind, last.micro_batch, last.chunk, last.direction, True)
        self.backward(backward_lane)

    @property
    def weights_owed(self) -> int:
        return len(self._owed)

    def _write(self, kind: Kind, lane: int, turn: int) -> None:
        chunk, direction, batches = self._lanes[lane]
        if turn < len(batches):
            self.actions.append(_action(kind, batches[turn], chunk, direction))
