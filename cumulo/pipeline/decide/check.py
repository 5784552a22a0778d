"""Proves a schedule complete, in an order its dependencies allow, and free of deadlock; tests, the command and the
executor call it before a schedule is trusted.

What is proved is what the simulator plays: blocking receives, untagged messages in the order they were sent, and
sends that either return at once or wait for their receive (`Sends`). One play is a proof: whether it comes to its
end does not depend on durations, since a stage's order is fixed and every link has one sender and one receiver.
"""

from collections import Counter
from dataclasses import dataclass

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, Sends
from cumulo.pipeline.decide.stall import ScheduleError
from cumulo.pipeline.simulate.timeline import simulate

_BEFORE = {Kind.BACKWARD_INPUT: Kind.FORWARD, Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a right schedule costs."""

    # Of each stage: the most activations alive at once, in micro-batches × chunks. One is alive from its forward to
    # its weight gradient, which still needs the chunk's inputs.
    peak_live_activations: tuple[int, ...]
    bubble_ratio: float  # idle share of the step with F = I = W = 1 and free communication


def check(schedule: PipelineSchedule, sends: Sends = Sends.BUFFERED) -> CheckReport:
    """Refuse a wrong schedule by naming a stage and an action; measure a right one."""
    _check_shape(schedule)
    for stage in range(schedule.stages):
        _check_stage(schedule, stage)
    timeline = simulate(schedule, sends=sends)
    return CheckReport(peak_live_activations(schedule), timeline.bubble_ratio)


def peak_live_activations(schedule: PipelineSchedule) -> tuple[int, ...]:
    """The most live activations of each stage, in micro-batches × chunks; they follow from the order alone."""
    peaks = []
    for stage in range(schedule.stages):
        alive = peak = 0
        for action in schedule.compute_order(stage):
            alive += (action.kind is Kind.FORWARD) - action.kind.gives_weight_gradient
            peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)


def _check_shape(schedule: PipelineSchedule) -> None:
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


def _check_stage(schedule: PipelineSchedule, stage: int) -> None:
    """Every micro-batch once forward, once each gradient, on every chunk of the stage, and nothing else."""
    name = schedule.name
    done: Counter[tuple[Kind, int, int, int]] = Counter()
    too_early: list[tuple[Action, Action]] = []  # an action, and what it needs
    for position, action in enumerate(schedule.orders[stage]):
        _check_belongs(schedule, stage, action)
        place = (action.micro_batch, action.chunk, action.direction)
        halves = (
            (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if action.kind is Kind.BACKWARD else (action.kind,)
        )
        for kind in halves:
            done[kind, *place] += 1
            if done[kind, *place] > 1:
                raise ScheduleError(f"{name}: stage {stage} runs {action} although that is already done")
            before = _BEFORE.get(kind)
            if before is not None and not done[before, *place]:
                too_early.append((action, Action(before, *place)))
        following = schedule.orders[stage][position + 1 : position + 2]
        if action.overlaps_next and not (
            following and following[0].kind.is_compute and action.kind.is_compute
        ):
            raise ScheduleError(f"{name}: stage {stage} overlaps {action} with no compute action after it")
    for direction in range(schedule.directions):
        for chunk in range(schedule.chunks):
            if schedule.stage_of(chunk, direction) != stage:
                continue
            for micro_batch in schedule.micro_batches_of(direction):
                for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                    if not done[kind, micro_batch, chunk, direction]:
                        missing = Action(kind, micro_batch, chunk, direction)
                        raise ScheduleError(f"{name}: stage {stage} never runs {missing}")
    for action, need in too_early:
        raise ScheduleError(f"{name}: stage {stage} runs {action} before {need}, which it needs")


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
