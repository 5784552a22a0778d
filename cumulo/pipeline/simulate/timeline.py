"""Plays a schedule in virtual time: `simulate` gives every action's start and end to checker, pictures and planner.

Each stage runs its actions in order; a receive waits for its message, which passes its link behind earlier ones.
A schedule that cannot be played to its end is refused by naming the stages and actions that wait for one another.
"""

from dataclasses import dataclass
from functools import cached_property

from cumulo.pipeline.decide.actions import Action, PipelineSchedule, Sends
from cumulo.pipeline.decide.communication import with_communication
from cumulo.pipeline.decide.costs import Costs
from cumulo.pipeline.decide.orders import check_orders
from cumulo.pipeline.simulate.events import compile_schedule, play


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it ran; the overlapped ones of a block share their times."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What the simulation found. Times begin at 0."""

    schedule: PipelineSchedule  # with its communication
    spans: tuple[tuple[Span, ...], ...]  # spans[stage], in order

    @cached_property
    def compute_spans(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(tuple(span for span in stage if span.action.kind.is_compute) for stage in self.spans)

    @cached_property
    def makespan_s(self) -> float:
        return max((spans[-1].end_s for spans in self.compute_spans if spans), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds each stage computes; what overlaps is counted once."""
        return tuple(
            sum(span.end_s - span.start_s for span in spans if not span.action.overlaps_next)
            for spans in self.compute_spans
        )

    @cached_property
    def bubble_s(self) -> tuple[float, ...]:
        """Seconds each stage idles between the step's begin and its end on the last stage."""
        return tuple(self.makespan_s - busy_s for busy_s in self.busy_s)

    @property
    def bubble_ratio(self) -> float:
        """The share of all stages together: idle time over stages × makespan."""
        whole_s = self.makespan_s * self.schedule.stages
        return sum(self.bubble_s) / whole_s if whole_s else 0.0

    @property
    def inner_bubble_s(self) -> tuple[float, ...]:
        """Seconds each stage idles between its own first and last action.

        The zero-bubble papers count this, because their optimizer step waits for no other stage.
        """
        return tuple(
            spans[-1].end_s - spans[0].start_s - busy_s if spans else 0.0
            for spans, busy_s in zip(self.compute_spans, self.busy_s, strict=True)
        )


def simulate(
    schedule: PipelineSchedule, costs: Costs | None = None, sends: Sends = Sends.BUFFERED
) -> Timeline:
    """Play the schedule, with communication added where it has none; the default costs are 1 for each kind."""
    costs = costs or Costs()
    costs.check_fits(schedule)
    full = with_communication(schedule, sends)
    check_orders(full)
    program = compile_schedule(full, sends)
    spans: list[tuple[Span, ...]] = []
    for mine, ends in zip(program.blocks, play(program, costs), strict=True):
        starts = (0.0, *ends)
        spans.append(
            tuple(
                Span(action, start_s, end_s)
                for block, start_s, end_s in zip(mine, starts, ends, strict=False)
                for action in block
            )
        )
    return Timeline(program.schedule, tuple(spans))
