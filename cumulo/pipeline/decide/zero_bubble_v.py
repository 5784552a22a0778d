"""ZB-V: two chunks per stage, placed down and up again; no bubble inside a stage (Qi et al. 2023, section 6).

The catalogue calls it.
"""

from cumulo.pipeline.decide.order import StageOrder

DOWN, UP = 0, 1


def zero_bubble_v(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """1F1B's memory, and with equal costs a stage never waits once it has begun.

    The last chunk is on stage 0, where micro-batches also enter, so the first backward needs no way back. The order
    is written for at least 2p-1 micro-batches, which fill the pipeline; with fewer, what is missing is left out.
    """
    order = StageOrder([(stage, 0, range(micro_batches)), (2 * stages - 1 - stage, 0, range(micro_batches))])
    turns = max(micro_batches, 2 * stages - 1)

    # Fill: forwards down until the first one comes back up, both in turn, then the first backwards.
    order.forward(DOWN, 2 * (stages - stage) - 1)
    for _ in range(stage):
        order.forward(UP)
        order.forward(DOWN)
    for _ in range(stages - stage):
        order.forward(UP)
        order.backward_input(UP)
        order.weight(UP)

    # Steady: each lane one forward, one backward. The way down has had stages-1-stage forwards more.
    for turn in range(stages, turns):
        if turn < turns - (stages - 1 - stage):
            order.forward(DOWN)
        order.backward_input(DOWN)
        order.weight(DOWN)
        order.forward(UP)
        order.backward_input(UP)
        order.weight(UP)

    # Drain: what others wait for first, weight gradients where there would be a gap.
    for _ in range(stage):
        order.backward_input(DOWN)
        order.backward_input(UP)
    for _ in range(stages - stage):
        order.backward_input(DOWN)
        order.weight(DOWN)
    for lane in (UP, DOWN):
        for _ in range(stages):
            order.weight(lane)
    return order
