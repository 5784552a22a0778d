"""What a schedule costs, by playing it: the hops on its longest way, and the bytes that its busiest rank, node and
network card carry. The planner's network model and the tuner turn them into seconds.

Played without bytes, in units of hops: a message leaves when its sender has come to that step, and arrives one hop
later; a rank goes on when its step's messages have arrived. The longest way through all ranks is what the
collective takes before its first byte counts. Bytes are added up per rank and node, as fractions of the buffer.

Ranks that are alike are played once: with `node_size` ranks to a node, the ranks of one node stand for those of all
nodes. Steps that repeat are not played to their end: once a round adds the same to all ranks, the rest is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, EvenSizes, Move, Transfer
from cumulo.collectives.decide.walk import Lane, ScheduleWalk

_FAR = 1 << 40  # a hop through the network outweighs all hops inside nodes


@dataclass(frozen=True, slots=True)
class PlayedCost:
    """Hops: on the longest way, one after another. Loads: of the buffer, so 1.0 is all of it."""

    near_hops: int  # inside a node
    far_hops: int  # between nodes
    near_load: float  # sent by the busiest rank to ranks of its node
    far_load: float  # sent out of the busiest node
    far_rank_load: float  # sent out of its node by the busiest rank
    most_messages: int  # that one rank, or the switch, starts in one step


def play_cost(schedule: CollectiveSchedule, node_size: int) -> PlayedCost:
    """`node_size` ranks with consecutive numbers share a node."""
    alike = _folds(schedule, node_size)
    ranks = range(min(node_size, schedule.ranks) if alike else schedule.ranks)
    hops = [
        _hops_alike(schedule, node_size, channel) if alike else _hops(schedule, node_size, channel)
        for channel in range(1 if alike else schedule.channels)
    ]
    far_hops, near_hops = divmod(max(hops), _FAR)
    total = max(1, _total(schedule))
    near_loads: dict[int, int] = {}
    far_loads: dict[int, int] = {}
    most = 0
    for rank in (*ranks, *range(schedule.ranks, schedule.nodes)):
        for channel in range(schedule.channels):
            for count, step in schedule.runs(rank, channel):
                sends = [transfer for transfer in step if transfer.move is Move.SEND]
                most = max(most, len({transfer.peer for transfer in sends}))
                for transfer in sends if rank < schedule.ranks else ():
                    near = transfer.peer // node_size == rank // node_size or transfer.peer >= schedule.ranks
                    loads = near_loads if near else far_loads
                    loads[rank] = loads.get(rank, 0) + count * schedule.elements(transfer)
    by_node: dict[int, int] = {}
    for rank, load in far_loads.items():
        by_node[rank // node_size] = by_node.get(rank // node_size, 0) + load
    return PlayedCost(
        near_hops,
        far_hops,
        max(near_loads.values(), default=0) / total,
        max(by_node.values(), default=0) / total,
        max(far_loads.values(), default=0) / total,
        most,
    )


def _total(schedule: CollectiveSchedule) -> int:
    """Elements of the buffer; of an all-to-all, of one rank's."""
    if schedule.collective == "all_to_all":
        return sum(schedule.sizes[: schedule.ranks])
    return schedule.sizes.total if isinstance(schedule.sizes, EvenSizes) else sum(schedule.sizes)


def _folds(schedule: CollectiveSchedule, node_size: int) -> bool:
    """Whether moving all ranks by a node changes nothing."""
    if not schedule.symmetry or schedule.ranks % node_size:
        return False
    inner, sizes = 1, []
    for radix in reversed(schedule.symmetry):
        sizes.append(inner)
        inner *= radix
    return len(schedule.symmetry) == 1 or node_size in (*sizes, inner)


def _hops_alike(schedule: CollectiveSchedule, node_size: int, channel: int) -> int:
    """All nodes are alike: rank r stands for r, r + node_size and so on."""
    size = min(node_size, schedule.ranks)
    runs = [schedule.runs(rank, channel) for rank in range(size)]
    at = [0] * size  # when each rank's last step ended
    for index in range(len(runs[0])):
        count = runs[0][index][0]
        heard = [_heard(rank, runs[rank][index][1], node_size) for rank in range(size)]
        at = _repeat(at, heard, count)
    return max(at)


def _heard(rank: int, step: CollectiveStep, node_size: int) -> list[tuple[int, int]]:
    """(rank that stands for the sender, what the message takes)."""
    return [
        (transfer.peer % node_size, 1 if transfer.peer // node_size == rank // node_size else _FAR)
        for transfer in step
        if transfer.move is not Move.SEND
    ]


def _repeat(at: list[int], heard: Sequence[Sequence[tuple[int, int]]], count: int) -> list[int]:
    """The same step so many times. Once a step, or a round of as many steps as there are ranks, has added the same
    to all ranks, every later one does: ranks that all begin a step later by some time end it later by that time."""
    past, left = [at], count
    while left:
        at = [
            max([at[rank], *[at[sender] + takes for sender, takes in some]])
            for rank, some in enumerate(heard)
        ]
        past.append(at)
        left -= 1
        for period in (1, len(at)):
            gain = _even_gain(past[-1 - period], at) if len(past) > period <= left else None
            if gain is not None:
                rounds = left // period
                at, past = [one + rounds * gain for one in at], []
                left -= rounds * period
    return at


def _even_gain(before: list[int], now: list[int]) -> int | None:
    """What was added, where it is the same for all."""
    gain = now[0] - before[0]
    return gain if all(one - other == gain for one, other in zip(now, before, strict=True)) else None


def _hops(schedule: CollectiveSchedule, node_size: int, channel: int) -> int:
    """Every rank, message by message."""

    def meet(sender: Lane, sent: Transfer, receiver: Lane, taken: Transfer) -> None:
        near = sender.rank // node_size == receiver.rank // node_size or sender.rank >= schedule.ranks
        receiver.ends = max(receiver.ends, sender.begun + (1 if near else _FAR))
        walk.end(sender)
        walk.end(receiver)

    walk = ScheduleWalk(schedule, meet, channels=(channel,))
    walk.start()
    walk.go_on()
    return max(lane.ends for lane in walk.lanes)
