"""Trees: reduce up, broadcast down, piece after piece, so that all levels work at the same time. The double binary
tree lets every rank send in one tree and only forward in the other, and so keeps all links busy (Sanders, Speck and
Träff 2009, and NCCL since 2.4). SHARP is a tree whose inner nodes are switches. The catalogue calls it.

A tree's messages have places in time: piece i leaves a node of depth d upwards at i + D − d, where D is the depth
of the deepest, and arrives at depth d on its way down at i + D + d − 1. A node's steps are its messages, by time;
both ends of a message agree on its time, so nothing can wait in a circle.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumulo.collectives.decide.schedule import (
    Collective,
    CollectiveSchedule,
    CollectiveStep,
    EvenSizes,
    Move,
    Transfer,
)


@dataclass(frozen=True, slots=True)
class TreePlace:
    """A node in a tree."""

    parent: int | None
    children: tuple[int, ...]
    depth: int  # 0: the root


@dataclass(frozen=True, slots=True)
class Tree:
    place: Callable[[int], TreePlace]
    depth: int  # of the deepest node


def tree_schedule(
    collective: Collective,
    name: str,
    ranks: int,
    elements: int,
    trees: Sequence[Tree],
    pieces: int = 1,
    root: int = 0,
    switches: int = 0,
) -> CollectiveSchedule:
    """A tree for each channel; each takes its share of the buffer in so many pieces."""
    channels = len(trees)
    up = collective in ("all_reduce", "reduce")
    down = collective in ("all_reduce", "broadcast")

    def program(node: int, channel: int) -> Sequence[CollectiveStep]:
        return _steps(trees[channel], node, range(channel * pieces, (channel + 1) * pieces), up, down)

    sizes = EvenSizes(elements, channels * pieces)
    return CollectiveSchedule(
        collective, name, ranks, sizes, program, channels, channels * pieces, root, switches
    )


def _steps(tree: Tree, node: int, chunks: range, up: bool, down: bool) -> list[CollectiveStep]:
    place, deepest = tree.place(node), tree.depth
    turn = deepest if up else 0  # when the first piece begins to go down
    at: dict[int, list[Transfer]] = defaultdict(list)
    for index, chunk in enumerate(chunks):
        if up:
            for child in place.children:
                at[index + deepest - place.depth - 1].append(Transfer(Move.REDUCE, child, chunk))
            if place.parent is not None:
                at[index + deepest - place.depth].append(Transfer(Move.SEND, place.parent, chunk))
        if down:
            if place.parent is not None:
                at[index + turn + place.depth - 1].append(Transfer(Move.COPY, place.parent, chunk))
            for child in place.children:
                at[index + turn + place.depth].append(Transfer(Move.SEND, child, chunk))
    return [tuple(at[time]) for time in sorted(at)]


def double_binary_tree(
    ranks: int, elements: int, pieces: int = 1, node_size: int = 1, channels: int = 2
) -> CollectiveSchedule:
    """All-reduce as NCCL's Tree: a double binary tree of nodes, a chain of GPUs inside each. Channel c uses tree
    c mod 2, and its chains begin at GPU c, so that each channel has its own network card."""
    trees = [_of_chains(ranks, node_size, channel) for channel in range(channels)]
    return tree_schedule("all_reduce", "tree", ranks, elements, trees, pieces)


def binomial(collective: Collective, ranks: int, elements: int, root: int = 0) -> CollectiveSchedule:
    """Broadcast or reduce in ⌈log₂ n⌉ steps: what has the buffer doubles in each."""

    def program(rank: int, channel: int) -> Sequence[CollectiveStep]:
        own = (rank - root) % ranks
        low = own & -own if own else 1 << ranks.bit_length()
        children = [own + (1 << bit) for bit in range(low.bit_length() - 1) if own + (1 << bit) < ranks]
        if collective == "broadcast":
            steps: list[CollectiveStep] = [
                (Transfer(Move.SEND, (child + root) % ranks, 0),) for child in reversed(children)
            ]
            return [(Transfer(Move.COPY, (own - low + root) % ranks, 0),), *steps] if own else steps
        steps = [(Transfer(Move.REDUCE, (child + root) % ranks, 0),) for child in children]
        return [*steps, (Transfer(Move.SEND, (own - low + root) % ranks, 0),)] if own else steps

    return CollectiveSchedule(collective, "binomial", ranks, EvenSizes(elements, 1), program, root=root)


def chain(
    collective: Collective, ranks: int, elements: int, root: int = 0, pieces: int = 1, channels: int = 1
) -> CollectiveSchedule:
    """Broadcast or reduce along a line from or to the root, piece after piece: NCCL's ring for them."""

    def place(rank: int) -> TreePlace:
        depth = (rank - root) % ranks
        children = ((rank + 1) % ranks,) if depth + 1 < ranks else ()
        return TreePlace((rank - 1) % ranks if depth else None, children, depth)

    trees = [Tree(place, ranks - 1)] * channels
    return tree_schedule(collective, "chain", ranks, elements, trees, pieces, root)


def in_switch(ranks: int, elements: int, radix: int, pieces: int = 1) -> CollectiveSchedule:
    """All-reduce in a tree of switches of which each has up to `radix` below it: a rank sends its buffer once and
    receives it once, whatever their number (SHARP; with one switch, NVLS)."""
    levels = [-(-ranks // radix)]  # switches of each level, from the leaves up
    while levels[-1] > 1:
        levels.append(-(-levels[-1] // radix))
    firsts = [ranks]
    for count in levels:
        firsts.append(firsts[-1] + count)

    def place(node: int) -> TreePlace:
        if node < ranks:
            return TreePlace(ranks + node // radix, (), len(levels))
        level = next(i for i in range(len(levels)) if node < firsts[i + 1])
        index = node - firsts[level]
        below, first = (ranks, 0) if level == 0 else (levels[level - 1], firsts[level - 1])
        children = tuple(range(first + index * radix, first + min(below, (index + 1) * radix)))
        parent = None if level + 1 == len(levels) else firsts[level + 1] + index // radix
        return TreePlace(parent, children, len(levels) - 1 - level)

    return tree_schedule(
        "all_reduce", "sharp", ranks, elements, [Tree(place, len(levels))], pieces, switches=sum(levels)
    )


def _of_chains(ranks: int, size: int, channel: int) -> Tree:
    nodes = -(-ranks // size)
    depth_of = _second_tree if channel % 2 else _first_tree
    places = [depth_of(node, nodes) for node in range(nodes)]

    def members(node: int) -> list[int]:
        here = list(range(node * size, min(ranks, (node + 1) * size)))
        turn = channel % len(here)
        return here[turn:] + here[:turn]

    def place(rank: int) -> TreePlace:
        node = rank // size
        outer, line = places[node], members(node)
        at = line.index(rank)
        after = (line[at + 1],) if at + 1 < len(line) else ()
        if at:
            return TreePlace(line[at - 1], after, outer.depth + at)
        parent = None if outer.parent is None else members(outer.parent)[0]
        return TreePlace(parent, (*after, *(members(child)[0] for child in outer.children)), outer.depth)

    deepest = max(one.depth + len(members(node)) - 1 for node, one in enumerate(places))
    return Tree(place, deepest)


def _first_tree(node: int, nodes: int) -> TreePlace:
    """A binary search tree's shape over 0 … n − 1 with 0 as its root: nodes of odd number are leaves."""
    if node == 0:
        top = 1 << ((nodes - 1).bit_length() - 1) if nodes > 1 else 0
        return TreePlace(None, (top,) if top else (), 0)
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    parent = up if up < nodes else node ^ bit
    left = node - bit // 2 if bit > 1 else None
    right, step = None, bit // 2
    while step and right is None:
        if node + step < nodes:
            right = node + step
        step //= 2
    children = tuple(child for child in (left, right) if child is not None)
    depth, above = 1, parent
    while above:
        bit = above & -above
        up = (above ^ bit) | (bit << 1)
        above = up if up < nodes else above ^ bit
        depth += 1
    return TreePlace(parent, children, depth)


def _second_tree(node: int, nodes: int) -> TreePlace:
    """The first one with its numbers turned round (n even) or moved by one (n odd), so that leaves become inner
    nodes."""

    def back(other: int) -> int:
        return nodes - 1 - other if nodes % 2 == 0 else (other + 1) % nodes

    found = _first_tree(nodes - 1 - node if nodes % 2 == 0 else (node - 1) % nodes, nodes)
    parent = None if found.parent is None else back(found.parent)
    return TreePlace(parent, tuple(back(child) for child in found.children), found.depth)
