"""The order DualPipe and DualPipeV share: forwards of one lane overlapped with backwards of the other.

Both have two *lanes* through a stage, whose flows come from opposite sides (DeepSeek-AI 2024, section 3.2.1):
DualPipe's are two directions through two copies of the model, DualPipeV's the two legs of a V.
"""

from collections.abc import Iterable

from cumulo.pipeline.decide.order import StageOrder

NEAR, FAR = 0, 1  # the lane whose micro-batches enter on this side of the pipeline, and the other


def dual_order(
    depth: int,
    position: int,
    turns: int,
    near: tuple[int, int, Iterable[int]],
    far: tuple[int, int, Iterable[int]],
) -> StageOrder:
    """A stage's order, `position` stages from where its near lane enters, of `depth` until the lanes' paths meet.

    `turns` micro-batches pass each lane; at least 2 × depth, so that the steady part exists on every stage.
    """
    order = StageOrder([near, far])
    to_the_middle = depth - 1 - position

    # Fill. At the middle (position depth-1) the far lane starts right behind the near one.
    order.forward(NEAR, 2 * to_the_middle)
    for _ in range(position + 1):
        order.forward(NEAR)
        order.forward(FAR)
    for _ in range(to_the_middle):
        order.backward_input(FAR)
        order.weight()
        order.forward(FAR)

    # Steady: both lanes forward and backward, each forward together with the other lane's backward.
    for turn in range(turns - 2 * depth + position + 1):
        if turn == 0 and position == depth - 1:
            order.forward(NEAR)  # nobody waits for this pair's forward: apart, its neighbour gets it sooner
            order.backward(FAR)
        else:
            order.overlapped(NEAR, FAR)
        order.overlapped(FAR, NEAR)

    # Drain. In the second half of the last backwards the weight gradients are put off to fill the gaps at the end.
    for _ in range(to_the_middle):
        order.backward(FAR)
        order.overlapped(FAR, NEAR)
    for step in range(2 * (position + 1)):
        lane = FAR if step % 2 == 0 else NEAR
        if step <= position:
            order.backward(lane)
        else:
            order.backward_input(lane)
    for _ in range(to_the_middle):
        order.weight()
        order.backward_input(NEAR)
    while order.weights_owed:
        order.weight()
    return order
