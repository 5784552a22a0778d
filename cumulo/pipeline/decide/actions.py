"""Action and PipelineSchedule: what stages do and in which order. Generators yield it; the checker, the
simulator and the executor take it.

A model is cut into `chunks`, numbered in the order activations pass them; a *stage* (one rank of the pipeline)
holds one or more. Schedules are written as compute actions only; `communication.with_communication` adds the
sends and receives.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from cumulo.pipeline.decide.placement import StagePlacement


class Kind(StrEnum):
    """What an action does with one micro-batch on one chunk."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"  # gradient of the chunk's input: what the chunk before is waiting for
    BACKWARD_WEIGHT = "W"  # gradient of the chunk's weights: nobody waits for it
    BACKWARD = "B"  # both at once
    SEND_ACTIVATION = "send activation"  # the chunk's output, to the next chunk
    RECEIVE_ACTIVATION = "receive activation"  # the chunk's input, from the chunk before
    SEND_GRADIENT = "send gradient"  # of the chunk's input, to the chunk before
    RECEIVE_GRADIENT = "receive gradient"  # of the chunk's output, from the next chunk

    @property
    def is_compute(self) -> bool:
        return self in _COMPUTE

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)

    @property
    def gives_input_gradient(self) -> bool:
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)

    @property
    def gives_weight_gradient(self) -> bool:
        return self in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


_COMPUTE = frozenset((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD))


@dataclass(frozen=True, slots=True)
class Action:
    """One thing one stage does. `direction` is 1 only for the second copy of a bidirectional pipeline."""

    kind: Kind
    micro_batch: int
    chunk: int
    direction: int = 0
    # Runs together with the action after it, which hides one's communication behind the other's arithmetic.
    overlaps_next: bool = False
    peer: int | None = None  # the other stage of a send or a receive

    def __str__(self) -> str:
        way = " reverse" if self.direction else ""
        peer = ""
        if self.peer is not None:
            peer = f" {'to' if self.kind.is_send else 'from'} stage {self.peer}"
        return f"{self.kind}(micro-batch {self.micro_batch}, chunk {self.chunk}{way}){peer}"


@dataclass(frozen=True)
class PipelineSchedule:
    """Every stage's actions in the order it runs them."""

    name: str
    stages: int
    micro_batches: int
    chunks_per_stage: int  # weights a stage holds, in chunks
    placement: StagePlacement
    orders: tuple[tuple[Action, ...], ...]  # orders[stage]

    @cached_property
    def chunks(self) -> int:
        """Chunks a micro-batch passes."""
        return self.placement.chunks(self.stages, self.chunks_per_stage)

    @property
    def directions(self) -> int:
        return self.placement.directions

    def stage_of(self, chunk: int, direction: int = 0) -> int:
        """The stage that holds a chunk."""
        return self._homes[direction][chunk]

    @cached_property
    def _homes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(self.placement.stage_of(self.stages, chunk, direction) for chunk in range(self.chunks))
            for direction in range(self.directions)
        )

    def micro_batches_of(self, direction: int) -> range:
        """The first half of the micro-batches goes one way through a bidirectional pipeline, the rest the other."""
        if self.directions == 1:
            return range(self.micro_batches)
        half = self.micro_batches // 2
        return range(half, self.micro_batches) if direction else range(half)

    @cached_property
    def has_communication(self) -> bool:
        return any(not action.kind.is_compute for order in self.orders for action in order)

    def compute_order(self, stage: int) -> tuple[Action, ...]:
        """The stage's actions without sends and receives."""
        return tuple(action for action in self.orders[stage] if action.kind.is_compute)


def blocks(order: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    """The order cut into what starts together: single actions, and overlapped groups."""
    together: list[Action] = []
    for action in order:
        together.append(action)
        if not action.overlaps_next:
            yield tuple(together)
            together = []
    if together:
        yield tuple(together)
