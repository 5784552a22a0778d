"""DualPipeV: half of DualPipe, folded into a V: weights held once (DeepSeek-AI 2025). The catalogue calls it."""

from cumulo.pipeline.decide.actions import PipelineSchedule, Placement
from cumulo.pipeline.decide.dual_order import dual_order
from cumulo.pipeline.decide.order import StageOrder


def dualpipe_v(stages: int, micro_batches: int) -> PipelineSchedule:
    """DualPipe's order with the two legs of a V in place of its two directions."""

    def stage_order(stage: int) -> StageOrder:
        down = (stage, 0, range(micro_batches))
        up = (2 * stages - 1 - stage, 0, range(micro_batches))
        return dual_order(stages, stage, micro_batches, down, up)

    orders = tuple(tuple(stage_order(stage).actions) for stage in range(stages))
    return PipelineSchedule("dualpipe-v", stages, micro_batches, 2, Placement.V, orders)
