"""How many micro-batches a stage must hold for backward at once, counted in the schedule that will run.

The memory ledger asks. Counts are by chunk, since chunks differ: the first embeds, the last takes the loss, and
layers do not always divide evenly.
"""

from dataclasses import dataclass
from functools import cache

from cumulo.pipeline.decide.actions import Kind, PipelineSchedule, Placement
from cumulo.pipeline.decide.catalog import build

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
    if schedule == "gpipe":  # all forwards come first
        return tuple(StageLoad(((stage, 0),), ((micro_batches,),)) for stage in range(stages))
    played = enough_micro_batches(schedule, stages, micro_batches)
    if played != micro_batches:
        return stage_loads(schedule, stages, played, chunks_per_stage)
    plan = build(schedule, stages, micro_batches, chunks_per_stage)
    return tuple(_load(plan, stage) for stage in range(stages))


def enough_micro_batches(schedule: str, stages: int, micro_batches: int) -> int:
    """After 2 micro-batches a stage the pattern repeats: further rounds change no peak (a test compares them).

    Not so for GPipe, which holds all of them, nor for interleaved rounds that the stages do not divide.
    """
    over = micro_batches % stages
    if schedule == "gpipe" or micro_batches <= 2 * stages or (over and schedule == "interleaved-1f1b"):
        return micro_batches
    return 2 * stages + over


def least_alive(schedule: str, stages: int, micro_batches: int, chunks_per_stage: int, stage: int) -> int:
    """What a stage holds at once at least, micro-batches of its chunks added up: no schedule is played (a test
    compares them)."""
    if stages == 1:
        return 1
    if schedule == "zb-h1":
        return min(micro_batches, stages)
    if schedule == "zb-v":
        return min(micro_batches + 1 + stage, 2 * stages, 2 * micro_batches)
    if schedule == "dualpipe":
        return stages + 1
    if schedule == "dualpipe-v":
        return 2 * stages + 1
    if schedule == "interleaved-1f1b" and micro_batches % stages == 0:
        ahead = (chunks_per_stage - 1) * stages + 2 * (stages - stage) - 1
        return min(micro_batches * chunks_per_stage, ahead)
    return min(micro_batches, stages - stage) * chunks_per_stage


def places_of(schedule: str, stages: int, chunks_per_stage: int, stage: int) -> tuple[Place, ...]:
    """The chunks of a stage."""
    if schedule == "dualpipe" and stages > 1:
        return ((stage, 0), (stages - 1 - stage, 1))
    if schedule in ("zb-v", "dualpipe-v") and stages > 1:
        return ((stage, 0), (2 * stages - 1 - stage, 0))
    return tuple((stage + lap * stages, 0) for lap in range(chunks_per_stage))


def _load(plan: PipelineSchedule, stage: int) -> StageLoad:
    if plan.placement is Placement.BIDIRECTIONAL:
        places = [(stage, 0), (plan.stages - 1 - stage, 1)]
    else:
        places = [(chunk, 0) for chunk in range(plan.chunks) if plan.stage_of(chunk) == stage]
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
    return StageLoad(tuple(places), _maximal(moments))


def _maximal(moments: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those that no other has at least as much as in every place."""
    return tuple(
        moment
        for moment in sorted(moments)
        if not any(other != moment and _covers(other, moment) for other in moments)
    )


def _covers(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))
