"""Says why a schedule cannot go on: which action of which stage waits for what, round to where it began.

The simulator calls it; `ScheduleError` is what a wrong schedule raises everywhere in this room.
"""

from dataclasses import dataclass
from typing import NoReturn

from cumulo.errors import CumuloError
from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule


class ScheduleError(CumuloError):
    """A schedule is incomplete, out of order or deadlocks; the message names the stage and the action."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A stage stands at `action` and waits for `stage`, which may be itself, to do what it needs."""

    action: Action
    stage: int
    needs: Action
    wrong_message: Action | None = None  # what has arrived instead of what is received


@dataclass(frozen=True)
class Stall:
    """Where every unfinished stage stands, and what is left of each stage's order."""

    schedule: PipelineSchedule
    sends: str
    heads: dict[int, Waiting]
    rest: list[list[Action]]


def explain(stall: Stall) -> NoReturn:
    """Raise the error for the most telling cause: a stage at odds with itself, else a cycle of stages."""
    name = stall.schedule.name
    for stage, waiting in stall.heads.items():
        if waiting.wrong_message is not None:
            raise ScheduleError(
                f"{name}: stage {stage} does {waiting.action}, but the next message on that link is for its "
                f"{_short(waiting.wrong_message)}; receive messages in the order in which they are sent"
            )
        if not any(_gives(action, waiting.needs) for action in stall.rest[waiting.stage]):
            raise ScheduleError(
                f"{name}: stage {stage} stands at {waiting.action}, which needs {waiting.needs}, "
                f"and stage {waiting.stage}'s order never has that"
            )
        if waiting.stage == stage:
            raise ScheduleError(
                f"{name}: stage {stage} runs {waiting.action} before {waiting.needs}, which it needs"
            )
    stage = min(stall.heads)
    seen: list[int] = []
    while stage not in seen:
        seen.append(stage)
        stage = stall.heads[stage].stage
    cycle = seen[seen.index(stage) :]
    steps = "; ".join(f"stage {stage} stands at {stall.heads[stage].action}" for stage in cycle)
    raise ScheduleError(
        f"{name}: deadlock with {stall.sends} sends: {steps}; each waits for the next, for ever"
    )


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
