"""Messages between stages: which send an action's output calls for, and which receive belongs to it. Communication
is added, played and explained by it.

Messages between two stages are never tagged: they arrive in the order they were sent (NCCL matches them in no other
way).
"""

from enum import StrEnum

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule


class Sends(StrEnum):
    """How a send behaves; receives always block."""

    BUFFERED = "buffered"  # returns at once (isend): receives stand right before what needs them
    RENDEZVOUS = "rendezvous"  # waits for its receive: both stand where the message is made


def send_after(schedule: PipelineSchedule, action: Action) -> Action | None:
    """The send that an action's output calls for, if another stage needs it."""
    if action.kind is Kind.FORWARD:
        kind, neighbour = Kind.SEND_ACTIVATION, action.chunk + 1
    elif action.kind.gives_input_gradient:
        kind, neighbour = Kind.SEND_GRADIENT, action.chunk - 1
    else:
        return None
    return _message(schedule, kind, action, neighbour)


def receive_before(schedule: PipelineSchedule, action: Action) -> Action | None:
    """The receive that an action's input calls for, if another stage makes it."""
    if action.kind is Kind.FORWARD:
        kind, neighbour = Kind.RECEIVE_ACTIVATION, action.chunk - 1
    elif action.kind.gives_input_gradient:
        kind, neighbour = Kind.RECEIVE_GRADIENT, action.chunk + 1
    else:
        return None
    return _message(schedule, kind, action, neighbour)


def receive_of(schedule: PipelineSchedule, send: Action) -> Action:
    """The receive on the other side of a send."""
    forward = send.kind is Kind.SEND_ACTIVATION
    return Action(
        Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT,
        send.micro_batch,
        send.chunk + 1 if forward else send.chunk - 1,
        send.direction,
        peer=schedule.stage_of(send.chunk, send.direction),
    )


def send_of(schedule: PipelineSchedule, receive: Action) -> Action:
    """The send on the other side of a receive."""
    forward = receive.kind is Kind.RECEIVE_ACTIVATION
    return Action(
        Kind.SEND_ACTIVATION if forward else Kind.SEND_GRADIENT,
        receive.micro_batch,
        receive.chunk - 1 if forward else receive.chunk + 1,
        receive.direction,
        peer=schedule.stage_of(receive.chunk, receive.direction),
    )


def _message(schedule: PipelineSchedule, kind: Kind, action: Action, neighbour: int) -> Action | None:
    if not 0 <= neighbour < schedule.chunks:
        return None
    peer = schedule.stage_of(neighbour, action.direction)
    if peer == schedule.stage_of(action.chunk, action.direction):
        return None  # both chunks on one stage: the tensor stays where it is
    return Action(kind, action.micro_batch, action.chunk, action.direction, peer=peer)
