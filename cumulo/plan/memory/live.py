"""How many micro-batches a stage must hold for backward at once, counted in the schedule that will run.

The memory ledger asks. Counts are by chunk, since chunks differ: the first embeds, the last takes the loss, and
layers do not always divide evenly.
"""

from dataclasses import dataclass
from functools import cache

from cumulo.pipeline.decide.actions import Kind, PipelineSchedule
from cumulo.pipeline.decide.catalog import build, family
from cumulo.pipeline.decide.placement import StagePlacement

Place = tuple[int, int]  # (chunk, direction)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What one stage holds."""

    places: tuple[Place, ...]  # its chunks
    # Moments at which no other moment holds more of every chunk: live micro-batches of each of `places`.
    peaks: tuple[tuple[int, ...], ...]

    def peak(self, sizes: dict[Place, int]) -> int:
        """The most bytes alive at once, when one micro-batch of a chunk takes `sizes`."""
        return max(
            sum(count * sizes[place] for count, place in zip(moment, self.places, strict=True))
            for moment in self.peaks
        )

    def holds_at_least(self, other: "StageLoad") -> bool:
        """Whether for each of the other's moments there is one here with as many of every chunk."""
        return all(any(_covers(mine, moment) for mine in self.peaks) for moment in other.peaks)


@cache
def stage_loads(
    schedule: str, stages: int, micro_batches: int, chunks_per_stage: int
) -> tuple[StageLoad, ...]:
    """Of every stage."""
    if stages == 1:
        return (StageLoad(((0, 0),), ((1,),)),)
    played = enough_micro_batches(schedule, stages, micro_batches)
    if played != micro_batches:
        return stage_loads(schedule, stages, played, chunks_per_stage)
    plan = build(schedule, stages, micro_batches, chunks_per_stage)
    return tuple(_load(plan, stage) for stage in range(stages))


def enough_micro_batches(schedule: str, stages: int, micro_batches: int) -> int:
    """Where the schedule's order repeats, further rounds than two change no peak (a test compares them)."""
    if micro_batches <= 2 * stages or not family(schedule).has_steady_part(stages, micro_batches):
        return micro_batches
    return 2 * stages + micro_batches % stages


def least_alive(schedule: str, stages: int, micro_batches: int, chunks_per_stage: int, stage: int) -> int:
    """What a stage holds at once at least, micro-batches of its chunks added up: no schedule is played (a test
    compares them)."""
    if stages == 1:
        return 1
    return family(schedule).formula.least_peak(stages, micro_batches, chunks_per_stage, stage)


def places_of(schedule: str, stages: int, chunks_per_stage: int, stage: int) -> tuple[Place, ...]:
    """The chunks of a stage."""
    placement = family(schedule).placement if stages > 1 else StagePlacement.LOOP
    return placement.held_by(stage, stages, chunks_per_stage)


def _load(plan: PipelineSchedule, stage: int) -> StageLoad:
    places = plan.placement.held_by(stage, plan.stages, plan.chunks_per_stage)
    index = {place: position for position, place in enumerate(places)}
    alive = [0] * len(places)
    moments: set[tuple[int, ...]] = set()
    grew = False  # since the last release: only then is this a peak
    for action in plan.compute_order(stage):
        position = index[action.chunk, action.direction]
        if action.kind is Kind.FORWARD:
            alive[position] += 1
            grew = True
        elif action.kind.gives_weight_gradient:
            if grew:
                moments.add(tuple(alive))
            alive[position] -= 1
            grew = False
    return StageLoad(places, _maximal(moments))


def _maximal(moments: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those that no other has at least as much as in every place."""
    return tuple(
        moment
        for moment in sorted(moments)
        if not any(other != moment and _covers(other, moment) for other in moments)
    )


def _covers(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))
