"""What orders must keep to, whatever their actions cost: a stage does its own work, once each, after what it needs,
and both ends of a link name the same messages in one order. The checker and the simulator ask.
"""

from collections import defaultdict
from collections.abc import Iterator

from cumulo.errors import CumuloError
from cumulo.pipeline.decide.actions import (
    Action,
    Kind,
    PipelineSchedule,
    blocks,
    other_end,
)

Done = tuple[Kind, int, int, int]  # what was done with which micro-batch, chunk and direction


class ScheduleError(CumuloError):
    """A schedule is incomplete, out of order or deadlocks; the message names the stage and the action."""


def check_complete(schedule: PipelineSchedule) -> None:
    """Every micro-batch once forward and once each gradient, on every chunk."""
    name = schedule.name
    if schedule.stages < 1 or schedule.micro_batches < 1 or schedule.chunks_per_stage < 1:
        raise ScheduleError(
            f"{name}: {schedule.stages} stages, {schedule.micro_batches} micro-batches and "
            f"{schedule.chunks_per_stage} chunks per stage: each must be 1 or more"
        )
    if len(schedule.orders) != schedule.stages:
        raise ScheduleError(f"{name}: {len(schedule.orders)} orders for {schedule.stages} stages")
    if schedule.directions == 2 and (schedule.micro_batches % 2 or schedule.chunks_per_stage != 2):
        raise ScheduleError(
            f"{name}: a bidirectional pipeline has an even number of micro-batches and 2 chunks per stage, not "
            f"{schedule.micro_batches} and {schedule.chunks_per_stage}"
        )
    done = [{given for action in order for given in _given(action)} for order in schedule.orders]
    for direction in range(schedule.directions):
        for chunk in range(schedule.chunks):
            stage = schedule.stage_of(chunk, direction)
            for micro_batch in schedule.micro_batches_of(direction):
                for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                    missing = (kind, micro_batch, chunk, direction)
                    if missing not in done[stage]:
                        raise ScheduleError(f"{name}: stage {stage} never runs {Action(*missing)}")


def check_orders(schedule: PipelineSchedule) -> None:
    """Refuse orders that no costs could make right, by naming a stage and an action."""
    for stage, order in enumerate(schedule.orders):
        for action in order:
            _check_belongs(schedule, stage, action)
    links = _links(schedule)
    for (_, receiver), (sent, taken) in links.items():
        both = set(sent) & set(taken)
        for due, receive in zip(
            filter(both.__contains__, sent), filter(both.__contains__, taken), strict=True
        ):
            if due != receive:
                raise ScheduleError(
                    f"{schedule.name}: stage {receiver} does {receive}, but the next message on that link is for "
                    f"{due}; receive messages in the order in which they are sent"
                )
    for stage in range(schedule.stages):
        _check_stage(schedule, stage)
    for (sender, receiver), (sent, taken) in links.items():
        for receive in set(taken).difference(sent):
            raise _missing(schedule, receiver, receive, sender, other_end(schedule, receive))
        for receive in set(sent).difference(taken):
            raise ScheduleError(
                f"{schedule.name}: stage {sender} sends what stage {receiver}'s order never takes with {receive}"
            )


def _links(schedule: PipelineSchedule) -> dict[tuple[int, int], tuple[list[Action], list[Action]]]:
    """By (sender, receiver): the receives that the sends call for, and those that there are."""
    found: dict[tuple[int, int], tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))
    for stage, order in enumerate(schedule.orders):
        for action in order:
            if action.peer is not None and action.kind.is_send:
                found[stage, action.peer][0].append(other_end(schedule, action))
            elif action.peer is not None:
                found[action.peer, stage][1].append(action)
    return found


def _check_stage(schedule: PipelineSchedule, stage: int) -> None:
    """Each action once, after what it needs of its own stage; what starts together cannot need each other."""
    done: set[Done] = set()
    order = schedule.orders[stage]
    for block in blocks(order):
        alone = len(block) == 1 and not block[0].overlaps_next
        if not alone and (block[-1].overlaps_next or not all(action.kind.is_compute for action in block)):
            raise ScheduleError(
                f"{schedule.name}: stage {stage} overlaps {block[0]} with no compute action after it"
            )
        for action in block:
            for need in _needs(schedule, stage, action):
                if need not in done:
                    if not any(need in _given(one) for one in order):
                        raise _missing(schedule, stage, action, stage, Action(*need))
                    raise ScheduleError(
                        f"{schedule.name}: stage {stage} runs {action} before {Action(*need)}, which it needs"
                    )
        for action in block:
            for given in _given(action):
                if given in done:
                    raise ScheduleError(
                        f"{schedule.name}: stage {stage} runs {action} although that is already done"
                    )
                done.add(given)


def _needs(schedule: PipelineSchedule, stage: int, action: Action) -> Iterator[Done]:
    """What an action needs its own stage to have done before."""
    at, chunk, kind = (action.micro_batch, action.chunk, action.direction), action.chunk, action.kind
    if kind.is_send:
        yield (Kind.FORWARD if kind is Kind.SEND_ACTIVATION else Kind.BACKWARD_INPUT, *at)
    elif kind is Kind.BACKWARD_WEIGHT:
        yield (Kind.BACKWARD_INPUT, *at)
    elif kind.is_compute:
        forward = kind is Kind.FORWARD
        if not forward:
            yield (Kind.FORWARD, *at)
        source = chunk - 1 if forward else chunk + 1
        if not 0 <= source < schedule.chunks:
            return
        if schedule.stage_of(source, action.direction) == stage:
            made = Kind.FORWARD if forward else Kind.BACKWARD_INPUT
            yield (made, action.micro_batch, source, action.direction)
        elif schedule.has_communication:
            yield (Kind.RECEIVE_ACTIVATION if forward else Kind.RECEIVE_GRADIENT, *at)


def _given(action: Action) -> list[Done]:
    """What is done when an action is: a backward is both of its halves."""
    halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if action.kind is Kind.BACKWARD else (action.kind,)
    return [(kind, action.micro_batch, action.chunk, action.direction) for kind in halves]


def _missing(schedule: PipelineSchedule, stage: int, at: Action, other: int, need: Action) -> ScheduleError:
    return ScheduleError(
        f"{schedule.name}: stage {stage} stands at {at}, which needs {need}, and stage {other}'s order never has "
        "that"
    )


def _check_belongs(schedule: PipelineSchedule, stage: int, action: Action) -> None:
    name = schedule.name
    if not (0 <= action.direction < schedule.directions and 0 <= action.chunk < schedule.chunks):
        raise ScheduleError(f"{name}: stage {stage} runs {action}, but there is no such chunk")
    if action.micro_batch not in schedule.micro_batches_of(action.direction):
        raise ScheduleError(f"{name}: stage {stage} runs {action}, but there is no such micro-batch")
    home = schedule.stage_of(action.chunk, action.direction)
    if home != stage:
        raise ScheduleError(f"{name}: stage {stage} runs {action}, but that chunk is on stage {home}")
    if action.peer is not None and not (0 <= action.peer < schedule.stages and action.peer != stage):
        raise ScheduleError(f"{name}: stage {stage} does {action}, but there is no such other stage")
    if action.peer is None and not action.kind.is_compute:
        raise ScheduleError(f"{name}: stage {stage} does {action} without saying with which stage")
