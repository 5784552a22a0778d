"""1F1B: one forward, one backward in turn (PipeDream-flush, Narayanan et al. 2021). The catalogue calls it."""

from cumulo.pipeline.decide.order import StageOrder


def one_f_one_b(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """GPipe's bubble, but a stage keeps at most as many activations as there are stages from it to the end."""
    order = StageOrder([(stage, 0, range(micro_batches))])
    # The later stages must be filled before the first backward can come back.
    warm_up = min(micro_batches, stages - 1 - stage)
    order.forward(0, warm_up)
    for _ in range(micro_batches - warm_up):
        order.forward(0)
        order.backward(0)
    order.backward(0, warm_up)
    return order
