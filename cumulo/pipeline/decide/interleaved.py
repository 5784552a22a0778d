"""Interleaved 1F1B: several chunks per stage, so the pipeline fills faster (Narayanan et al. 2021, section 2.2).

The catalogue calls it.
"""

from cumulo.pipeline.decide.order import StageOrder


def interleaved(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """1F1B's bubble divided by `chunks_per_stage`, for as many times its messages.

    Micro-batches go in rounds: a stage takes a round through its first chunk, then through the second, and so on.
    Megatron's rounds have exactly `stages` micro-batches; rounds that are a little longer are as good and lift the
    condition that the micro-batches must divide by the stages.
    """
    rounds = round_sizes(stages, micro_batches)
    forward_lanes = [lane for size in rounds for lane in range(chunks_per_stage) for _ in range(size)]
    backward_lanes = [
        lane for size in rounds for lane in reversed(range(chunks_per_stage)) for _ in range(size)
    ]
    order = StageOrder([(stage + lap * stages, 0, range(micro_batches)) for lap in range(chunks_per_stage)])
    # Until the first micro-batch has been through all chunks, and two more per stage it must come back over:
    # one for the way there, one for the way back.
    warm_up = min((chunks_per_stage - 1) * rounds[0] + 2 * (stages - 1 - stage), len(forward_lanes))
    for lane in forward_lanes[:warm_up]:
        order.forward(lane)
    for forward, backward in zip(forward_lanes[warm_up:], backward_lanes, strict=False):
        order.forward(forward)
        order.backward(backward)
    for lane in backward_lanes[len(forward_lanes) - warm_up :]:
        order.backward(lane)
    return order


def round_sizes(stages: int, micro_batches: int) -> list[int]:
    """Rounds of at least `stages` micro-batches (all in one where there are fewer), as even as can be, longest
    first."""
    rounds = max(1, micro_batches // stages)
    short, longer = divmod(micro_batches, rounds)
    return [short + 1] * longer + [short] * (rounds - longer)
