"""Adds sends and receives to a compute-only schedule, one pass for every generator; checker, simulator and executor
use the result.

Messages between two stages are never tagged: they arrive in the order they were sent, so the pass receives them in
that order, too, even where a later one is needed first (NCCL matches messages in no other way).
"""

from collections import deque
from enum import StrEnum

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, blocks


class Sends(StrEnum):
    """How a send behaves; receives always block."""

    BUFFERED = "buffered"  # returns at once (isend): receives stand right before what needs them
    RENDEZVOUS = "rendezvous"  # waits for its receive: both stand where the message is made


def with_communication(schedule: PipelineSchedule, sends: Sends = Sends.BUFFERED) -> PipelineSchedule:
    """The schedule with a send behind every output another stage needs, and its receive on the other side."""
    if schedule.has_communication:
        return schedule
    orders = _received_when_needed(schedule) if sends is Sends.BUFFERED else _received_when_made(schedule)
    return PipelineSchedule(
        schedule.name,
        schedule.stages,
        schedule.micro_batches,
        schedule.chunks_per_stage,
        schedule.placement,
        tuple(tuple(order) for order in orders),
    )


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


def _received_when_needed(schedule: PipelineSchedule) -> list[list[Action]]:
    """Each receive as late as its order on the channel allows: no stage waits for what it does not need yet."""
    channels: dict[tuple[int, int], deque[Action]] = {}  # (from, to) -> receives in the order of the sends
    sends = [{action: send_after(schedule, action) for action in order} for order in schedule.orders]
    for stage, stage_sends in enumerate(sends):
        for send in stage_sends.values():
            if send is not None and send.peer is not None:
                channels.setdefault((stage, send.peer), deque()).append(receive_of(schedule, send))
    orders: list[list[Action]] = []
    for stage, order in enumerate(schedule.orders):
        written: list[Action] = []
        received: set[Action] = set()
        for block in blocks(order):
            for action in block:
                receive = receive_before(schedule, action)
                if receive is None or receive in received or receive.peer is None:
                    continue
                channel = channels.get((receive.peer, stage), deque())
                while channel and receive not in received:
                    received.add(channel[0])
                    written.append(channel.popleft())
            written += block
            written += [send for action in block if (send := sends[stage][action]) is not None]
        orders.append(written)
    return orders


def _received_when_made(schedule: PipelineSchedule) -> list[list[Action]]:
    """Send and receive at one point of a single order of all stages' actions: neither waits for the other's future.

    That order is the one of unit costs, so that a receive seldom stands before work that could be done already.
    """
    # Here, because the simulator itself adds communication to what has none.
    from cumulo.pipeline.decide.costs import Costs
    from cumulo.pipeline.simulate.timeline import simulate

    # (time, messages before what starts then, stage, position, what)
    events: list[tuple[float, int, int, int, Action]] = []
    for stage, spans in enumerate(simulate(schedule, Costs()).compute_spans):
        for position, span in enumerate(spans):
            events.append((span.start_s, 1, stage, position, span.action))
            if (send := send_after(schedule, span.action)) is not None:
                events.append((span.end_s, 0, stage, position, send))
    orders: list[list[Action]] = [[] for _ in range(schedule.stages)]
    for *_, stage, _, action in sorted(events, key=lambda event: event[:4]):
        orders[stage].append(action)
        if action.peer is not None:
            orders[action.peer].append(receive_of(schedule, action))
    return orders
