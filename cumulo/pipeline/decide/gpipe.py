"""GPipe: all forwards, then all backwards (Huang et al. 2019). The catalogue calls it."""

from cumulo.pipeline.decide.actions import PipelineSchedule, Placement
from cumulo.pipeline.decide.order import StageOrder


def gpipe(stages: int, micro_batches: int) -> PipelineSchedule:
    """Simple, and every micro-batch's activations are alive at once."""

    def stage_order(stage: int) -> StageOrder:
        order = StageOrder([(stage, 0, range(micro_batches))])
        order.forward(0, micro_batches)
        order.backward(0, micro_batches)
        return order

    orders = tuple(tuple(stage_order(stage).actions) for stage in range(stages))
    return PipelineSchedule("gpipe", stages, micro_batches, 1, Placement.LOOP, orders)
