"""GPipe: all forwards, then all backwards (Huang et al. 2019). The catalogue calls it."""

from cumulo.pipeline.decide.order import StageOrder


def gpipe(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """Simple, and every micro-batch's activations are alive at once."""
    order = StageOrder([(stage, 0, range(micro_batches))])
    order.forward(0, micro_batches)
    order.backward(0, micro_batches)
    return order
