"""Seconds that a pipeline takes for a step: the makespan of the very schedule that the trainer would run, and a
bound below it that costs microseconds, by which the search drops what cannot win.
"""

from functools import lru_cache
from itertools import accumulate

from cumulo.pipeline.decide.catalog import build, family
from cumulo.pipeline.decide.costs import ChunkCost, Costs, Link
from cumulo.pipeline.simulate.events import Program, compile_schedule, makespan_s


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
