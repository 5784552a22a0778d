"""Seconds that a pipeline takes for a step: the makespan of the very schedule that the trainer would run."""

from functools import lru_cache

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
