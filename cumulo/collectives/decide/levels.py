"""Two levels: first inside a node, where links are fast, then between nodes. Two-level all-reduce, rings over
rails, and all-to-alls, of which one crosses the network once for each node. The catalogue calls it."""

from collections.abc import Sequence

from cumulo.collectives.decide.ring import ring_all_reduce, ring_round
from cumulo.collectives.decide.schedule import (
    CollectiveSchedule,
    CollectiveStep,
    EvenSizes,
    Move,
    Transfer,
)
from cumulo.errors import ConfigError


def two_level_all_reduce(ranks: int, elements: int, node_size: int) -> CollectiveSchedule:
    """Reduce-scatter inside each node, all-reduce between the GPUs of one index, all-gather inside: a card carries
    2(k − 1)/k of a g-th of the buffer."""
    nodes = whole_nodes(ranks, node_size)

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        node, local = divmod(rank, node_size)
        near, far = range(node * node_size, (node + 1) * node_size), range(local, ranks, node_size)

        def block(member: int) -> int:  # of `nodes` chunks: GPU l keeps block l
            return member % node_size * nodes

        def share(member: int) -> int:
            return local * nodes + member // node_size

        return [
            *ring_round(near, local, Move.REDUCE, block, nodes),
            *ring_round(far, node, Move.REDUCE, share),
            *ring_round(far, node, Move.COPY, share),
            *ring_round(near, local, Move.COPY, block, nodes),
        ]

    sizes = EvenSizes(elements, ranks)
    return CollectiveSchedule("all_reduce", "two-level", ranks, sizes, program, symmetry=(nodes, node_size))


def multi_ring_all_reduce(ranks: int, elements: int, node_size: int, rounds: int = 1) -> CollectiveSchedule:
    """A ring for each rail. Ring c enters even nodes at GPU c and leaves them at c − 1, and goes through odd nodes
    the other way, so that it changes nodes between cards of one rail."""
    orders = rail_orders(ranks, node_size)
    return ring_all_reduce(ranks, elements, len(orders), rounds, orders, "multi-ring")


def rail_orders(ranks: int, node_size: int) -> list[list[int]]:
    orders = []
    for channel in range(node_size):
        order: list[int] = []
        for node in range(whole_nodes(ranks, node_size)):
            inside = [node * node_size + (channel + step) % node_size for step in range(node_size)]
            order += inside if node % 2 == 0 else reversed(inside)
        orders.append(order)
    return orders


def pairwise_all_to_all(ranks: int, sizes: Sequence[int]) -> CollectiveSchedule:
    """n − 1 steps: in step s, to the rank s after and from the rank s before."""

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        return [_exchange(rank, ranks, away) for away in range(1, ranks)]

    return CollectiveSchedule("all_to_all", "pairwise", ranks, sizes, program, symmetry=(ranks,))


def direct_all_to_all(ranks: int, sizes: Sequence[int]) -> CollectiveSchedule:
    """Everything at once: one step of n − 1 messages each way."""

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        together = [transfer for away in range(1, ranks) for transfer in _exchange(rank, ranks, away)]
        return [tuple(together)] if together else []

    return CollectiveSchedule("all_to_all", "direct", ranks, sizes, program, symmetry=(ranks,))


def _exchange(rank: int, ranks: int, away: int) -> CollectiveStep:
    to, source = (rank + away) % ranks, (rank - away) % ranks
    return (
        Transfer(Move.SEND, to, rank * ranks + to),
        Transfer(Move.COPY, source, source * ranks + rank),
    )


def bruck_all_to_all(ranks: int, sizes: Sequence[int]) -> CollectiveSchedule:
    """⌈log₂ n⌉ steps: a chunk whose way is d ranks long moves in the steps of d's bits (Bruck et al. 1997). Each
    chunk passes several ranks, so it is for short messages."""

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        steps: list[CollectiveStep] = []
        bit = 1
        while bit < ranks:
            sends, takes = [], []
            for way in range(ranks):
                if way & bit:
                    # A chunk that has moved by the lower bits of its way is at `rank` now.
                    source = (rank - way % bit) % ranks
                    sends.append(
                        Transfer(Move.SEND, (rank + bit) % ranks, source * ranks + (source + way) % ranks)
                    )
                    source = (rank - bit - way % bit) % ranks
                    takes.append(
                        Transfer(Move.COPY, (rank - bit) % ranks, source * ranks + (source + way) % ranks)
                    )
            steps.append((*sends, *takes))
            bit *= 2
        return steps

    return CollectiveSchedule("all_to_all", "bruck", ranks, sizes, program, symmetry=(ranks,))


def two_level_all_to_all(ranks: int, sizes: Sequence[int], node_size: int) -> CollectiveSchedule:
    """First over the network to the GPU of the same index in the node that is meant, then inside that node to the
    GPU (DeepSeek-V3, section 3.2.2): n/g − 1 messages leave a card, not n − g."""
    nodes = whole_nodes(ranks, node_size)

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        node, local = divmod(rank, node_size)
        steps: list[CollectiveStep] = []
        for away in range(1, nodes):
            to, source = (node + away) % nodes, (node - away) % nodes
            peer = source * node_size + local
            steps.append(
                (
                    Transfer(Move.SEND, to * node_size + local, rank * ranks + to * node_size, node_size),
                    Transfer(Move.COPY, peer, peer * ranks + node * node_size, node_size),
                )
            )
        for away in range(1, node_size):
            to = node * node_size + (local + away) % node_size
            other = (local - away) % node_size
            peer = node * node_size + other
            sends = [Transfer(Move.SEND, to, (far * node_size + local) * ranks + to) for far in range(nodes)]
            takes = [
                Transfer(Move.COPY, peer, (far * node_size + other) * ranks + rank) for far in range(nodes)
            ]
            steps.append((*sends, *takes))
        return steps

    return CollectiveSchedule("all_to_all", "two-level", ranks, sizes, program, symmetry=(nodes, node_size))


def whole_nodes(ranks: int, node_size: int) -> int:
    if node_size < 1 or ranks % node_size:
        raise ConfigError(
            f"{ranks} ranks are no whole number of nodes of {node_size}; give a node size that divides them"
        )
    return ranks // node_size
