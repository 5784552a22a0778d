"""Seconds a pipeline takes for a step: the makespan of the very schedule that the trainer would run, and a bound
below it that costs microseconds. `step` calls both.

`cumulo.pipeline.simulate.timeline` keeps every action's times, for checks and pictures. A search wants one number
a thousand times: here the same orders are played with nothing kept, and tests hold the two to the same makespan.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from cumulo.pipeline.decide.actions import Kind, blocks
from cumulo.pipeline.decide.catalog import build, family
from cumulo.pipeline.decide.costs import ChunkCost

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)
_CODES = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_INPUT: _INPUT,
    Kind.BACKWARD_WEIGHT: _WEIGHT,
}


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
    for stage in range(stages):
        mine = sum(busy[chunk] for chunk, _ in chosen.placement.held_by(stage, stages, chunks_per_stage))
        first = min(before[stage], before[stages - 1 - stage]) if chosen.bidirectional else before[stage]
        best = max(best, first + each * mine)
    return best


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

    def after(count: int) -> float:
        orders = _orders(name, stages, count * stages + over, chunks_per_stage)
        return _play(orders, costs, latency_s, transfer_s)

    chosen = family(name)
    first = 3 if chosen.overlaps else 2
    if chosen.has_steady_part(stages, micro_batches) and rounds > 3 * (first + 1):
        times = [after(first + count) for count in range(3)]
        round_s = times[2] - times[1]
        if abs(round_s - (times[1] - times[0])) <= 1e-9 * round_s:
            return times[2] + (rounds - first - 2) * round_s
    return after(rounds)


@dataclass(frozen=True, slots=True)
class _Orders:
    """A schedule as numbers: for each stage its blocks, each of (code, place of the chunk, micro-batch)."""

    blocks: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]
    homes: tuple[
        int, ...
    ]  # the stage of each place; places of the second direction come after those of the first
    chunks: int
    micro_batches: int


@lru_cache(256)
def _orders(name: str, stages: int, micro_batches: int, chunks_per_stage: int) -> _Orders:
    schedule = build(name, stages, micro_batches, chunks_per_stage)
    found = tuple(
        tuple(
            tuple(
                (_CODES[part.kind], part.direction * schedule.chunks + part.chunk, part.micro_batch)
                for part in block
            )
            for block in blocks(order)
        )
        for order in schedule.orders
    )
    homes = tuple(
        schedule.stage_of(chunk, way)
        for way in range(schedule.directions)
        for chunk in range(schedule.chunks)
    )
    return _Orders(found, homes, schedule.chunks, micro_batches)


def _play(orders: _Orders, costs: tuple[ChunkCost, ...], latency_s: float, transfer_s: float) -> float:
    chunks, homes, batches = orders.chunks, orders.homes, orders.micro_batches
    seconds = [(c.forward_s, c.backward_s, c.backward_input_s, c.backward_weight_s) for c in costs]
    # When a place's input or output gradient is there; absent: not yet.
    inputs: dict[int, float] = {}
    gradients: dict[int, float] = {}
    link_free: dict[tuple[int, int], float] = {}
    clock, reached = [0.0] * len(orders.blocks), [0] * len(orders.blocks)
    ready = deque(range(len(orders.blocks)))
    waiting = [False] * len(orders.blocks)

    def deliver(target: dict[int, float], key: int, home: int, peer: int, now: float) -> None:
        if peer != home:
            left = max(now, link_free.get((home, peer), 0.0)) + transfer_s
            link_free[home, peer] = left
            now = left + latency_s
            if waiting[peer]:
                waiting[peer] = False
                ready.append(peer)
        target[key] = now

    while ready:
        stage = ready.popleft()
        mine, position, now = orders.blocks[stage], reached[stage], clock[stage]
        while position < len(mine):
            start = now
            for code, place, batch in mine[position]:
                chunk = place % chunks
                key = place * batches + batch
                if code == _FORWARD and chunk:
                    at = inputs.get(key)
                elif code in (_BACKWARD, _INPUT) and chunk < chunks - 1:
                    at = gradients.get(key)
                else:
                    continue
                if at is None:
                    waiting[stage] = True
                    break
                start = max(start, at)
            if waiting[stage]:
                break
            now = start + sum(seconds[place % chunks][code] for code, place, _ in mine[position])
            for code, place, batch in mine[position]:
                chunk = place % chunks
                if code == _FORWARD and chunk < chunks - 1:
                    deliver(inputs, (place + 1) * batches + batch, stage, homes[place + 1], now)
                elif code in (_BACKWARD, _INPUT) and chunk:
                    deliver(gradients, (place - 1) * batches + batch, stage, homes[place - 1], now)
            position += 1
        reached[stage], clock[stage] = position, now
    return max(clock)


def messages_of_stage(stages: int, micro_batches: int, chunks_per_stage: int) -> int:
    """Messages that a stage in the middle sends in a step: an activation on and a gradient back for each chunk."""
    return 0 if stages == 1 else 2 * micro_batches * chunks_per_stage
