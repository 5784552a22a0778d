"""DualPipeV: half of DualPipe, folded into a V: weights held once (DeepSeek-AI 2025). The catalogue calls it."""

from cumulo.pipeline.decide.dual_order import dual_order
from cumulo.pipeline.decide.order import StageOrder


def dualpipe_v(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """DualPipe's order with the two legs of a V in place of its two directions."""
    down = (stage, 0, range(micro_batches))
    up = (2 * stages - 1 - stage, 0, range(micro_batches))
    return dual_order(stages, stage, micro_batches, down, up)
