"""Proves a schedule complete, in an order its dependencies allow, and free of deadlock; tests, the command and the
executor call it before a schedule is trusted.

What is proved is what the simulator plays: blocking receives, untagged messages in the order they were sent, and
sends that either return at once or wait for their receive (`Sends`). One play is a proof: whether it comes to its
end does not depend on durations, since a stage's order is fixed and every link has one sender and one receiver.
"""

from dataclasses import dataclass

from cumulo.pipeline.decide.actions import Kind, PipelineSchedule, Sends
from cumulo.pipeline.decide.orders import check_complete, check_orders
from cumulo.pipeline.simulate.timeline import simulate


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a right schedule costs."""

    # Of each stage: the most activations alive at once, in micro-batches × chunks. One is alive from its forward to
    # its weight gradient, which still needs the chunk's inputs.
    peak_live_activations: tuple[int, ...]
    bubble_ratio: float  # idle share of the step with F = I = W = 1 and free communication


def check(schedule: PipelineSchedule, sends: Sends = Sends.BUFFERED) -> CheckReport:
    """Refuse a wrong schedule by naming a stage and an action; measure a right one."""
    check_complete(schedule)
    check_orders(schedule)
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
