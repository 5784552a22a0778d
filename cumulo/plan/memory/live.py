"""How many micro-batches a stage must hold for backward at once, counted in the schedule that will run.

The memory ledger asks. Counts are by chunk, since chunks differ: the first embeds, the last takes the loss, and
layers do not always divide evenly.
"""

import operator
from dataclasses import dataclass
from functools import cache

from cumulo.pipeline.decide.actions import Kind, PipelineSchedule
from cumulo.pipeline.decide.catalog import build, family
from cumulo.plan.job import Recompute, TrainJob
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import Cut, Share, layer_operations

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


@cache
def stage_loads(
    schedule: str, stages: int, micro_batches: int, chunks_per_stage: int
) -> tuple[StageLoad, ...]:
    """The loads of every stage."""
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
    """Loads of which no other has at least as much as in every place."""
    return tuple(
        moment
        for moment in sorted(moments)
        if not any(other != moment and all(map(operator.ge, other, moment)) for other in moments)
    )


# Bytes a layer keeps for backward, tensor by tensor, under every recompute choice. The memory ledger asks.
#
# Counted for one token of a rank, in the manner of Korthikanti et al. 2022 (section 4): what each operation must
# see again in backward. h is the width, f the feed-forward's, s the sequence's length, e the bytes of an
# activation, t the tensor-parallel ranks. For GPT with 16-bit activations and dropout this is their equation 1,
# 34 + 5 a s/h bytes for each of h, and with t and sequence parallelism their table 2.

# Outputs of norms and activations: what products take, and what can be computed again from its own input.
_PRODUCT_INPUTS = (("norm",), ("activation",))


def layer_bytes_per_token(job: TrainJob, layer_has_experts: bool, recompute: Recompute) -> float:
    """Kept for backward by one layer of a rank, for each of its tokens (`TrainJob.tokens_per_rank`)."""
    tp, between = job.layout.tp, job.layout.tp if job.layout.sequence_parallel else 1
    if recompute == "full":  # the first operation's input
        return job.activation_bytes_each * _input_numbers(job.split_model, layer_has_experts) / between
    each = 1 if job.narrow_activations else job.activation_bytes_each
    eight_bits = job.dtype == "float8"
    kept = _kept_bytes(
        job.split_model, layer_has_experts, each, eight_bits, _keys(job), job.dropout, recompute
    )
    return sum(size / Share(tp, between).ranks(cut) for cut, size in kept)


def working_bytes_per_token(job: TrainJob, layer_has_experts: bool) -> float:
    """What backward of one layer needs beside what is kept; a recomputed layer's own activations are not in
    it."""
    numbers = _working_numbers(job.split_model, layer_has_experts, _keys(job))
    return job.activation_bytes_each * numbers / job.layout.tp


def _keys(job: TrainJob) -> int:
    """For which scores are kept: flash attention computes them again."""
    return 0 if job.flash_attention else job.sequence_length


@cache
def _input_numbers(model: ModelSpec, layer_has_experts: bool) -> int:
    return layer_operations(model, layer_has_experts)[0].kept[0].numbers


@cache
def _kept_bytes(
    model: ModelSpec,
    layer_has_experts: bool,
    each: int,
    eight_bits: bool,
    keys: int,
    dropout: bool,
    recompute: Recompute,
) -> tuple[tuple[Cut, int], ...]:
    """Before they are divided over tensor-parallel ranks. `eight_bits`: products keep their inputs as they took
    them; those of norms and activations have no other reader."""
    again = recompute.split("+")
    found: dict[Cut, int] = {}
    for operation in layer_operations(model, layer_has_experts):
        for kept in operation.kept:
            if (dropout or not kept.dropout) and not any(name in again for name in kept.again):
                width = 1 if eight_bits and kept.again in _PRODUCT_INPUTS else kept.bytes_each or each
                size = width * kept.numbers * (keys if kept.per_key else 1)
                found[kept.cut] = found.get(kept.cut, 0) + size
    return tuple(found.items())


@cache
def _working_numbers(model: ModelSpec, layer_has_experts: bool, keys: int) -> int:
    """Gradients of the widest pair of tensors: the feed-forward's inner ones, or the scores'."""
    operations = layer_operations(model, layer_has_experts)
    inner = sum(found.moved for found in operations if found.again == "activation")
    return max(inner, 2 * keys * max((found.scores.heads for found in operations if found.scores), default=0))
