"""The reference player: all ranks of a schedule in this process, one after another. Tests and `cumulo collective
run` compare real processes with it, bit by bit: it adds in the same order."""

from collections import defaultdict

from torch import Tensor

from cumulo.collectives.decide.schedule import CollectiveSchedule, Transfer
from cumulo.collectives.decide.walk import Lane, ScheduleWalk
from cumulo.collectives.play.tensor_chunks import TensorChunks


def play_here(
    schedule: CollectiveSchedule, tensors: list[Tensor], received: list[Tensor] | None = None
) -> None:
    """Plays a schedule in place. `tensors` by rank; switches have their own."""
    nodes = [
        TensorChunks(schedule, rank, tensors[rank], received[rank] if received else None)
        for rank in range(schedule.ranks)
    ]
    for switch in range(schedule.ranks, schedule.nodes):
        nodes.append(TensorChunks(schedule, switch, tensors[0].new_empty(schedule.offsets[-1])))
    arrived: dict[Lane, list[tuple[Transfer, list[Tensor]]]] = defaultdict(list)

    def meet(sender: Lane, sent: Transfer, receiver: Lane, taken: Transfer) -> None:
        arrived[receiver].append((taken, [view.clone() for view in nodes[sender.rank].views(sent)]))
        walk.end(sender)
        walk.end(receiver)

    walk = ScheduleWalk(schedule, meet)
    walk.start()
    walk.go_on(lambda lane: nodes[lane.rank].take_in(arrived.pop(lane, [])))
