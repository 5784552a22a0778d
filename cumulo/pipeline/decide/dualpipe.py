"""DualPipe: from both ends at once, over two copies of the model (DeepSeek-AI 2024). The catalogue calls it."""

from cumulo.pipeline.decide.dual_order import dual_order
from cumulo.pipeline.decide.order import StageOrder


def dualpipe(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """Less than a third of 1F1B's bubble, and forwards overlap with backwards; weights are held twice.

    Stages `s` and `stages - 1 - s` hold the same two chunks and mirror each other.
    """
    half = micro_batches // 2
    with_stage = (stage, 0, range(half))
    against = (stages - 1 - stage, 1, range(half, micro_batches))
    if stage < stages // 2:
        return dual_order(stages // 2, stage, half, with_stage, against)
    return dual_order(stages // 2, stages - 1 - stage, half, against, with_stage)
