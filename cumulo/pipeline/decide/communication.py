"""Adds sends and receives to a compute-only schedule, one pass for every generator; checker, simulator and executor
use the result.

Messages arrive in the order they were sent, so the pass receives them in that order, too, even where a later one is
needed first.
"""

from collections import deque

from cumulo.pipeline.decide.actions import (
    Action,
    PipelineSchedule,
    Sends,
    blocks,
    other_end,
    receive_before,
    send_after,
)
from cumulo.pipeline.decide.costs import Costs
from cumulo.pipeline.simulate.events import played_blocks


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


def _received_when_needed(schedule: PipelineSchedule) -> list[list[Action]]:
    """Each receive as late as its order on the channel allows: no stage waits for what it does not need yet."""
    channels: dict[tuple[int, int], deque[Action]] = {}  # (from, to) -> receives in the order of the sends
    sends = [{action: send_after(schedule, action) for action in order} for order in schedule.orders]
    for stage, stage_sends in enumerate(sends):
        for send in stage_sends.values():
            if send is not None and send.peer is not None:
                channels.setdefault((stage, send.peer), deque()).append(other_end(schedule, send))
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
    # (time, messages before what starts then, stage, position, what)
    events: list[tuple[float, int, int, int, Action]] = []
    for stage, spans in enumerate(played_blocks(schedule, Costs())):
        for position, (block, start_s, end_s) in enumerate(spans):
            for action in block:
                events.append((start_s, 1, stage, position, action))
                if (send := send_after(schedule, action)) is not None:
                    events.append((end_s, 0, stage, position, send))
    orders: list[list[Action]] = [[] for _ in range(schedule.stages)]
    for *_, stage, _, action in sorted(events, key=lambda event: event[:4]):
        orders[stage].append(action)
        if action.peer is not None:
            orders[action.peer].append(other_end(schedule, action))
    return orders
