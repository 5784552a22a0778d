"""Bounds below the seconds that a pipeline takes for a step: one costs microseconds, the other is closer and looks
at how the schedule's orders begin and end. The search drops what cannot win by them.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from cumulo.pipeline.decide.actions import Action, blocks
from cumulo.pipeline.decide.catalog import build, family
from cumulo.pipeline.decide.costs import ChunkCost, Costs, Link
from cumulo.pipeline.simulate.events import Program, compile_schedule, makespan_s
from cumulo.plan.memory.live import enough_micro_batches


@lru_cache(1024)
def played_s(
    name: str,
    stages: int,
    micro_batches: int,
    chunks_per_stage: int,
    costs: tuple[ChunkCost, ...],
    latency_s: float,
    transfer_s: float,
) -> float:
    """The schedule's makespan; a message holds its link for `transfer_s` and arrives `latency_s` later.

    Once the pipeline is full, every `stages` micro-batches add the same time: a long step is played until two such
    rounds agree, and continued from there.
    """
    rounds, over = divmod(micro_batches, stages)

    # Over a link of 1 byte/s a message has as many bytes as it takes seconds.
    all_costs = Costs(costs, link=Link(latency_s, 1.0), message_bytes=transfer_s)

    def after(count: int) -> float:
        return makespan_s(_program(name, stages, count * stages + over, chunks_per_stage), all_costs)

    chosen = family(name)
    first = 3 if chosen.overlaps else 2
    if chosen.has_steady_part(stages, micro_batches) and rounds > 3 * (first + 1):
        times = [after(first + count) for count in range(3)]
        round_s = times[2] - times[1]
        if abs(round_s - (times[1] - times[0])) <= 1e-9 * round_s:
            return times[2] + (rounds - first - 2) * round_s
    return after(rounds)


@lru_cache(256)
def _program(name: str, stages: int, micro_batches: int, chunks_per_stage: int) -> Program:
    return compile_schedule(build(name, stages, micro_batches, chunks_per_stage))


def bound_s(
    name: str, stages: int, micro_batches: int, chunks_per_stage: int, costs: tuple[ChunkCost, ...]
) -> float:
    """No schedule of this name can be faster.

    A stage is busy for all its micro-batches; it starts after the forwards of the chunks before its first one, and
    where backward is one action, their backwards come after its last. A bidirectional pipeline's stage has half of
    the micro-batches from each end, the first of them from the nearer. Exact for even stages without communication
    (Narayanan et al. 2021, section 2.2: the bubble of (p−1)(f+b), f and b being of one chunk).
    """
    chosen = family(name)
    busy = [cost.forward_s + cost.backward_s for cost in costs]
    waits = [
        cost.forward_s if chosen.splits_backward else both_s for cost, both_s in zip(costs, busy, strict=True)
    ]
    before = list(accumulate(waits, initial=0.0))
    each = micro_batches / chosen.placement.directions
    best = 0.0
    for stage, held in enumerate(_held(name, stages, chunks_per_stage)):
        mine = sum([busy[chunk] for chunk in held])
        first = min(before[stage], before[stages - 1 - stage]) if chosen.bidirectional else before[stage]
        best = max(best, first + each * mine)
    return best


@lru_cache(1024)
def _held(name: str, stages: int, chunks_per_stage: int) -> tuple[tuple[int, ...], ...]:
    """Chunks of each stage."""
    placement = family(name).placement
    return tuple(
        tuple(chunk for chunk, _ in placement.held_by(stage, stages, chunks_per_stage))
        for stage in range(stages)
    )


def close_bound_s(
    name: str,
    stages: int,
    micro_batches: int,
    chunks_per_stage: int,
    costs: tuple[ChunkCost, ...],
    message_s: float,
) -> float:
    """No schedule of this name can be faster when a message takes `message_s`. Never below `bound_s`, and within a
    percent of the schedule's makespan where gradients of weights have places of their own.

    From any action of its order on, a stage is busy with the rest of it. Its first forward waits until one has
    passed the chunks before, its first backward until one has been through all chunks and back to it. After its
    last gradient of an input the chunks before have theirs to compute.
    """
    chosen = family(name)
    placement, last = chosen.placement, len(costs) - 1
    homes = [placement.stage_of(stages, chunk) for chunk in range(last + 1)]
    hops = [message_s if here != there else 0.0 for here, there in pairwise(homes)]
    gradients = [cost.backward_input_s if chosen.splits_backward else cost.backward_s for cost in costs]
    # When the first micro-batch can enter a chunk; how long a gradient takes from a chunk's input to the model's.
    enters = list(
        accumulate((cost.forward_s + hop for cost, hop in zip(costs, hops, strict=False)), initial=0.0)
    )
    leaves = list(accumulate((each + hop for each, hop in zip(gradients, hops, strict=False)), initial=0.0))
    turns_s = enters[last] + costs[last].forward_s + leaves[last] + gradients[last]
    weight_s = costs[0].backward_weight_s if chosen.splits_backward else 0.0
    each = micro_batches / placement.directions
    played = enough_micro_batches(name, stages, micro_batches)
    orders = _ends(name, stages, played, chunks_per_stage)
    best = 0.0
    for held, ends in zip(_held(name, stages, chunks_per_stage), orders, strict=True):
        busy_s = each * sum([costs[chunk].forward_s + costs[chunk].backward_s for chunk in held])
        ahead_s = sum([count * costs[chunk].forward_s for chunk, count in ends.forwards_before])
        returns_s = turns_s - leaves[ends.first_backward] - gradients[ends.first_backward]
        starts_s = max(enters[ends.first_forward], returns_s - ahead_s)
        ends_s = busy_s
        if ends.last_backward:  # to chunk 0, which then has a gradient of its weights to compute
            owed_s = sum([count * costs[chunk].backward_weight_s for chunk, count in ends.weights_after])
            ends_s = max(busy_s, busy_s - owed_s + leaves[ends.last_backward] + weight_s)
        best = max(best, starts_s + ends_s)
    return best


@dataclass(frozen=True, slots=True)
class _OrderEnds:
    """How a stage's order begins and ends: chunks, and (chunk, how many) pairs."""

    first_forward: int
    first_backward: int
    last_backward: int
    forwards_before: tuple[tuple[int, int], ...]  # that end before the first backward starts
    weights_after: tuple[tuple[int, int], ...]  # gradients of weights, after the last backward


@lru_cache(1024)
def _ends(name: str, stages: int, micro_batches: int, chunks_per_stage: int) -> tuple[_OrderEnds, ...]:
    return tuple(_ends_of(order) for order in build(name, stages, micro_batches, chunks_per_stage).orders)


def _ends_of(order: tuple[Action, ...]) -> _OrderEnds:
    before: Counter[int] = Counter()
    after: Counter[int] = Counter()
    first = last = order[0].chunk
    for block in blocks(order):
        backwards = [action.chunk for action in block if action.kind.gives_input_gradient]
        if backwards:
            first = backwards[0]
            break
        before.update(action.chunk for action in block)
    for action in reversed(order):
        if action.kind.gives_input_gradient:
            last = action.chunk
            break
        after[action.chunk] += 1
    return _OrderEnds(order[0].chunk, first, last, tuple(before.items()), tuple(after.items()))
