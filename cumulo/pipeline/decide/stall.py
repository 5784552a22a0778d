"""Says why a schedule cannot go on: which action of which stage waits for what, round to where it began.

The simulator calls it; `ScheduleError` is what a wrong schedule raises everywhere in this room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from cumulo.errors import CumuloError
from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, Sends, receive_of, send_of


class ScheduleError(CumuloError):
    """A schedule is incomplete, out of order or deadlocks; the message names the stage and the action."""


@dataclass(frozen=True, slots=True)
class StalledAt:
    """A stage stands at `action` and waits for `stage`, which may be itself, to do what it needs."""

    action: Action
    stage: int
    needs: Action
    wrong_message: Action | None = None  # what has arrived instead of what is received


def explain(
    schedule: PipelineSchedule,
    sends: Sends,
    orders: Sequence[Sequence[tuple[Action, ...]]],
    reached: Sequence[int],
) -> NoReturn:
    """Raise the error for the most telling cause: a stage at odds with itself, else a cycle of stages.

    `orders`: of each stage, in blocks, of which it has done as many as it has `reached`.
    """
    name = schedule.name
    heads = {
        stage: found
        for stage, order in enumerate(orders)
        if reached[stage] < len(order) and (found := _stalled(schedule, sends, orders, reached, stage))
    }
    for stage, waiting in heads.items():
        if waiting.wrong_message is not None:
            raise ScheduleError(
                f"{name}: stage {stage} does {waiting.action}, but the next message on that link is for its "
                f"{_short(waiting.wrong_message)}; receive messages in the order in which they are sent"
            )
        rest = (action for block in orders[waiting.stage][reached[waiting.stage] :] for action in block)
        if not any(_gives(action, waiting.needs) for action in rest):
            raise ScheduleError(
                f"{name}: stage {stage} stands at {waiting.action}, which needs {waiting.needs}, "
                f"and stage {waiting.stage}'s order never has that"
            )
        if waiting.stage == stage:
            raise ScheduleError(
                f"{name}: stage {stage} runs {waiting.action} before {waiting.needs}, which it needs"
            )
    stage = min(heads)
    seen: list[int] = []
    while stage not in seen:
        seen.append(stage)
        stage = heads[stage].stage
    cycle = seen[seen.index(stage) :]
    steps = "; ".join(f"stage {stage} stands at {heads[stage].action}" for stage in cycle)
    raise ScheduleError(
        f"{name}: deadlock with {sends.value} sends: {steps}; each waits for the next, for ever"
    )


def _stalled(
    schedule: PipelineSchedule,
    sends: Sends,
    orders: Sequence[Sequence[tuple[Action, ...]]],
    reached: Sequence[int],
    stage: int,
) -> StalledAt | None:
    """What keeps a stage from its next block; None: nothing."""
    done = [
        [action for block in order[:count] for action in block]
        for order, count in zip(orders, reached, strict=True)
    ]
    block = orders[stage][reached[stage]]
    action, peer = block[0], block[0].peer or 0
    if action.kind.is_receive:
        sent = [receive_of(schedule, one) for one in done[peer] if one.kind.is_send and one.peer == stage]
        taken = sum(one.kind.is_receive and one.peer == peer for one in done[stage])
        if sent[taken : taken + 1] == [action]:
            return None
        return StalledAt(action, peer, send_of(schedule, action), sent[taken] if taken < len(sent) else None)
    if action.kind.is_send:
        made = Kind.FORWARD if action.kind is Kind.SEND_ACTIVATION else Kind.BACKWARD_INPUT
        source = Action(made, action.micro_batch, action.chunk, action.direction)
        if not any(_gives(one, source) for one in done[stage]):
            return StalledAt(action, stage, source)
        receive, next_block = receive_of(schedule, action), orders[peer][reached[peer] : reached[peer] + 1]
        if sends is Sends.BUFFERED or (next_block and next_block[0][0] == receive):
            return None
        return StalledAt(action, peer, receive)
    for part in block:
        for holder, need in _needs(schedule, part, stage):
            if not any(_gives(one, need) for one in done[holder]):
                return StalledAt(part, holder, need)
    return None


def _needs(schedule: PipelineSchedule, action: Action, stage: int) -> list[tuple[int, Action]]:
    """What a compute action needs to have happened, and where. Without receives its input is there once the stage
    that makes it has done so."""
    batch, chunk, way = action.micro_batch, action.chunk, action.direction
    if action.kind is Kind.BACKWARD_WEIGHT:
        return [(stage, Action(Kind.BACKWARD_INPUT, batch, chunk, way))]
    forward = action.kind is Kind.FORWARD
    found = [] if forward else [(stage, Action(Kind.FORWARD, batch, chunk, way))]
    source = chunk - 1 if forward else chunk + 1
    if 0 <= source < schedule.chunks:
        holder = schedule.stage_of(source, way)
        if holder != stage and schedule.has_communication:
            kind = Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT
            found.append((stage, Action(kind, batch, chunk, way)))
        else:
            made = Kind.FORWARD if forward else Kind.BACKWARD_INPUT
            found.append((holder, Action(made, batch, source, way)))
    return found


def _short(action: Action) -> str:
    return f"{action.kind}(micro-batch {action.micro_batch}, chunk {action.chunk})"


def _gives(action: Action, need: Action) -> bool:
    same = (action.micro_batch, action.chunk, action.direction) == (
        need.micro_batch,
        need.chunk,
        need.direction,
    )
    both = need.kind is Kind.BACKWARD_INPUT and action.kind is Kind.BACKWARD
    return same and (action.kind is need.kind or both)
