"""Action and PipelineSchedule: what stages do and in which order. Generators yield it; the checker, the
simulator and the executor take it.

A model is cut into `chunks`, numbered in the order activations pass them; a *stage* (one rank of the pipeline)
holds one or more. Schedules are written as compute actions only; `communication.with_communication` adds the
sends and receives.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property


class StagePlacement(StrEnum):
    LOOP = "loop"  # chunk c on stage c mod p: round and round
    V = "v"  # chunks 0 … p-1 down the stages, p … 2p-1 back up: stage 0 has the first and the last
    # Two copies of the model, in opposite directions: chunk c of direction 0 on stage c, of direction 1 on p-1-c.
    BIDIRECTIONAL = "bidirectional"

    @property
    def directions(self) -> int:
        return 2 if self is StagePlacement.BIDIRECTIONAL else 1

    def chunks(self, stages: int, chunks_per_stage: int) -> int:
        """Chunks a micro-batch passes. A bidirectional pipeline has each of them twice, once for each direction."""
        return stages * chunks_per_stage // self.directions

    def stage_of(self, stages: int, chunk: int, direction: int = 0) -> int:
        lap, position = divmod(chunk, stages)
        backwards = (
            direction if self is StagePlacement.BIDIRECTIONAL else self is StagePlacement.V and lap % 2
        )
        return stages - 1 - position if backwards else position

    @cache
    def held_by(self, stage: int, stages: int, chunks_per_stage: int) -> tuple[tuple[int, int], ...]:
        """The (chunk, direction) pairs of a stage; direction 1 is the second copy of a bidirectional pipeline."""
        return tuple(
            (chunk, direction)
            for direction in range(self.directions)
            for chunk in range(self.chunks(stages, chunks_per_stage))
            if self.stage_of(stages, chunk, direction) == stage
        )


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


class Sends(StrEnum):
    """How a send behaves; receives always block."""

    BUFFERED = "buffered"  # returns at once (isend): receives stand right before what needs them
    RENDEZVOUS = "rendezvous"  # waits for its receive: both stand where the message is made


# What a message is at its other end, and how many chunks ahead the chunk is that it belongs to there.
_OTHER_END = {
    Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1),
    Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1),
    Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1),
}


def send_after(schedule: PipelineSchedule, action: Action) -> Action | None:
    """The send that an action's output calls for, if another stage needs it."""
    forward = action.kind is Kind.FORWARD
    return _message(schedule, Kind.SEND_ACTIVATION if forward else Kind.SEND_GRADIENT, action)


def receive_before(schedule: PipelineSchedule, action: Action) -> Action | None:
    """The receive that an action's input calls for, if another stage makes it."""
    forward = action.kind is Kind.FORWARD
    return _message(schedule, Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT, action)


def other_end(schedule: PipelineSchedule, message: Action) -> Action:
    """The receive of a send, or the send of a receive."""
    kind, ahead = _OTHER_END[message.kind]
    peer = schedule.stage_of(message.chunk, message.direction)
    return Action(kind, message.micro_batch, message.chunk + ahead, message.direction, peer=peer)


def _message(schedule: PipelineSchedule, kind: Kind, action: Action) -> Action | None:
    neighbour = action.chunk + _OTHER_END[kind][1]
    speaks = action.kind is Kind.FORWARD or action.kind.gives_input_gradient
    if not speaks or not 0 <= neighbour < schedule.chunks:
        return None
    peer = schedule.stage_of(neighbour, action.direction)
    if peer == schedule.stage_of(action.chunk, action.direction):
        return None  # both chunks on one stage: the tensor stays where it is
    return Action(kind, action.micro_batch, action.chunk, action.direction, peer=peer)
