"""StageOrder, which writes a stage's actions and hands out micro-batches in turn, and the generators of all
schedules, which use it. The catalogue calls them."""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from cumulo.pipeline.decide.actions import Action, Kind

# Actions are plain values and schedules have many alike: making one takes ten times as long as finding it.
_action = lru_cache(1 << 16)(Action)


class StageOrder:
    """Appends actions for numbered *lanes*: the chunks of one stage, each with the micro-batches that pass it.

    Every schedule here takes the micro-batches of a lane in rising order, so a generator only says "the next
    forward of lane 1". What it asks for beyond the last micro-batch is left out: a schedule written for many
    micro-batches stays right for few.
    """

    def __init__(self, lanes: Sequence[tuple[int, int, Iterable[int]]]) -> None:
        """`lanes`: (chunk, direction, micro-batches) of each."""
        self.actions: list[Action] = []
        self._lanes = [(chunk, direction, tuple(batches)) for chunk, direction, batches in lanes]
        self._forwards = [0] * len(lanes)
        self._backwards = [0] * len(lanes)
        self._owed: deque[tuple[int, int]] = deque()  # weight gradients put off: (lane, turn), oldest first

    def forward(self, lane: int, times: int = 1) -> None:
        for _ in range(times):
            self._write(Kind.FORWARD, lane, self._forwards[lane])
            self._forwards[lane] += 1

    def backward(self, lane: int, times: int = 1) -> None:
        """Input and weight gradients in one."""
        for _ in range(times):
            self._write(Kind.BACKWARD, lane, self._backwards[lane])
            self._backwards[lane] += 1

    def backward_input(self, lane: int, times: int = 1) -> None:
        """The input gradient now; the weight gradient is owed."""
        for _ in range(times):
            self._write(Kind.BACKWARD_INPUT, lane, self._backwards[lane])
            self._owed.append((lane, self._backwards[lane]))
            self._backwards[lane] += 1

    def weight(self, lane: int | None = None) -> None:
        """The weight gradient owed longest, by one lane or by any; nothing where none is owed."""
        for position, (owing, turn) in enumerate(self._owed):
            if lane is None or owing == lane:
                del self._owed[position]
                self._write(Kind.BACKWARD_WEIGHT, owing, turn)
                return

    def overlapped(self, forward_lane: int, backward_lane: int) -> None:
        """A forward and a backward at the same time."""
        written = len(self.actions)
        self.forward(forward_lane)
        backward_follows = self._backwards[backward_lane] < len(self._lanes[backward_lane][2])
        if len(self.actions) > written and backward_follows:
            last = self.actions[-1]
            self.actions[-1] = _action(last.kind, last.micro_batch, last.chunk, last.direction, True)
        self.backward(backward_lane)

    @property
    def weights_owed(self) -> int:
        return len(self._owed)

    def _write(self, kind: Kind, lane: int, turn: int) -> None:
        chunk, direction, batches = self._lanes[lane]
        if turn < len(batches):
            self.actions.append(_action(kind, batches[turn], chunk, direction))


def gpipe(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """GPipe (Huang et al. 2019): simple, and every micro-batch's activations are alive at once."""
    order = StageOrder([(stage, 0, range(micro_batches))])
    order.forward(0, micro_batches)
    order.backward(0, micro_batches)
    return order


def one_f_one_b(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """1F1B (PipeDream-flush, Narayanan et al. 2021): GPipe's bubble, but a stage keeps at most as many activations
    as there are stages from it to the end."""
    order = StageOrder([(stage, 0, range(micro_batches))])
    # The later stages must be filled before the first backward can come back.
    warm_up = min(micro_batches, stages - 1 - stage)
    order.forward(0, warm_up)
    for _ in range(micro_batches - warm_up):
        order.forward(0)
        order.backward(0)
    order.backward(0, warm_up)
    return order


def interleaved(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): 1F1B's bubble divided by `chunks_per_stage`, for as
    many times its messages.

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


def zero_bubble_h1(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """ZB-H1 (Qi et al. 2023, section 2.1): a third of 1F1B's bubble for the same memory, because the gradient that
    the stage before waits for is computed first.

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


DOWN, UP = 0, 1


def zero_bubble_v(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """ZB-V (Qi et al. 2023, section 6): 1F1B's memory, and with equal costs a stage never waits once it has begun.

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


NEAR, FAR = 0, 1  # the lane whose micro-batches enter on this side of the pipeline, and the other


def dual_order(
    depth: int,
    position: int,
    turns: int,
    near: tuple[int, int, Iterable[int]],
    far: tuple[int, int, Iterable[int]],
) -> StageOrder:
    """The order that DualPipe and DualPipeV share: forwards of one lane overlapped with backwards of the other.

    Both have two lanes through a stage, whose flows come from opposite sides (DeepSeek-AI 2024, section 3.2.1):
    DualPipe's are two directions through two copies of the model, DualPipeV's the two legs of a V. The stage is
    `position` stages from where its near lane enters, of `depth` until the lanes' paths meet.

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


def dualpipe(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """DualPipe (DeepSeek-AI 2024): less than a third of 1F1B's bubble, and forwards overlap with backwards; weights
    are held twice.

    Stages `s` and `stages - 1 - s` hold the same two chunks and mirror each other.
    """
    half = micro_batches // 2
    with_stage = (stage, 0, range(half))
    against = (stages - 1 - stage, 1, range(half, micro_batches))
    if stage < stages // 2:
        return dual_order(stages // 2, stage, half, with_stage, against)
    return dual_order(stages // 2, stages - 1 - stage, half, against, with_stage)


def dualpipe_v(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """DualPipeV (DeepSeek-AI 2025): DualPipe's order with the two legs of a V in place of its two directions."""
    down = (stage, 0, range(micro_batches))
    up = (2 * stages - 1 - stage, 0, range(micro_batches))
    return dual_order(stages, stage, micro_batches, down, up)
