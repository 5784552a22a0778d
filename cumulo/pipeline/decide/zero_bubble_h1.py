"""ZB-H1: 1F1B with weight gradients in the bubble (Qi et al. 2023, section 2.1). The catalogue calls it."""

from cumulo.pipeline.decide.order import StageOrder


def zero_bubble_h1(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """A third of 1F1B's bubble for the same memory: the gradient that the stage before waits for is computed first.

    Stage s owes s weight gradients before it starts paying: 1F1B has it hold `stages - s` activations, so every
    stage holds as many as stage 0 does anyway.
    """
    order = StageOrder([(stage, 0, range(micro_batches))])
    warm_up = min(micro_batches, stages - 1 - stage)
    order.forward(0, warm_up)
    for turn in range(micro_batches):
        if turn < micro_batches - warm_up:
            order.forward(0)
        order.backward_input(0)
        if turn >= stage:
            order.weight()
    while order.weights_owed:
        order.weight()
    return order
