"""The reference player: all ranks of a schedule in this process, one after another. Tests and `cumulo collective
run` compare real processes with it, bit by bit: it adds in the same order."""

from collections import defaultdict, deque

from torch import Tensor

from cumulo.collectives.decide.schedule import CollectiveSchedule, Move, Transfer
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
    lanes = {
        (rank, channel): deque(schedule.steps(rank, channel))
        for rank in range(schedule.nodes)
        for channel in range(schedule.channels)
    }
    sent: dict[tuple[int, int, int], deque[list[Tensor]]] = defaultdict(deque)
    begun: set[tuple[int, int]] = set()
    arrived: dict[tuple[int, int], list[tuple[Transfer, list[Tensor]]]] = defaultdict(list)
    while any(lanes.values()):
        for lane, steps in lanes.items():
            if not steps:
                continue
            rank, channel = lane
            if lane not in begun:
                begun.add(lane)
                for transfer in steps[0]:
                    if transfer.move is Move.SEND:
                        values = [view.clone() for view in nodes[rank].views(transfer)]
                        sent[rank, transfer.peer, channel].append(values)
            waiting = [t for t in steps[0] if t.move is not Move.SEND][len(arrived[lane]) :]
            for transfer in waiting:
                if not sent[transfer.peer, rank, channel]:
                    break
                arrived[lane].append((transfer, sent[transfer.peer, rank, channel].popleft()))
            else:
                nodes[rank].take_in(arrived.pop(lane, []))
                begun.discard(lane)
                steps.popleft()
