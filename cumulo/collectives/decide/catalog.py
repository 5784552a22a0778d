"""The catalogue: every algorithm by the collective it carries out, and how to make its schedule. The command, the
tuner, the players and the cost model ask here.

    make_schedule("all_reduce", "tree", CollectiveShape(ranks=16, elements=1 << 20, node_size=8))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cumulo.base.nearest import did_you_mean
from cumulo.collectives.decide import hypercube, levels, ring, trees
from cumulo.collectives.decide.schedule import Collective, CollectiveSchedule, EvenSizes, Move, Transfer
from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CollectiveShape:
    """What a schedule is made for. Elements are counted as nccl-tests counts bytes: all_reduce, broadcast and
    reduce: the buffer; all_gather: what each rank has afterwards; reduce_scatter: what each rank has before;
    all_to_all: what each rank sends, its own part included."""

    ranks: int
    elements: int
    node_size: int = 1  # ranks of one node, where an algorithm has two levels
    channels: int = 1
    pieces: int = 1  # of a channel's share, that follow each other through a pipeline
    root: int = 0
    blocks: tuple[int, ...] = ()  # uneven: elements of each rank (all_to_all: of each pair); (): even
    radix: int = 32  # ports down of a switch that adds


Make = Callable[[CollectiveShape], CollectiveSchedule]


def _blocks(shape: CollectiveShape, blocks: int) -> Sequence[int]:
    """Chunk by chunk: the blocks of the ranks, each in channels × pieces."""
    parts = shape.channels * shape.pieces
    if shape.blocks:
        if len(shape.blocks) != blocks:
            raise ConfigError(f"{len(shape.blocks)} block sizes were given, and {blocks} are needed")
        return [size for block in shape.blocks for size in EvenSizes(block, parts)]
    if parts == 1:
        return EvenSizes(shape.elements, blocks)
    return [size for block in EvenSizes(shape.elements, blocks) for size in EvenSizes(block, parts)]


def _ring(collective: Collective, move: Move, shape: CollectiveShape) -> CollectiveSchedule:
    sizes, pieces = _blocks(shape, shape.ranks), shape.channels * shape.pieces
    return ring.rings(collective, (move,), shape.ranks, sizes, shape.channels, pieces)


def _one_each(shape: CollectiveShape) -> Sequence[int]:
    return _blocks(replace(shape, channels=1, pieces=1), shape.ranks)


def _pairs(shape: CollectiveShape) -> Sequence[int]:
    pairs = shape.ranks * shape.ranks
    if shape.blocks:
        return _blocks(replace(shape, channels=1, pieces=1), pairs)
    return _Rows(EvenSizes(shape.elements, shape.ranks))


@dataclass(frozen=True)
class _Rows(Sequence[int]):
    """The same row for every rank, without listing n² numbers."""

    row: Sequence[int]

    def __len__(self) -> int:
        return len(self.row) ** 2

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if index >= len(self):
            raise IndexError(index)
        return self.row[index % len(self.row)]


def _in_channels(make: Callable[[int, int], CollectiveSchedule]) -> Make:
    """An algorithm of one channel on several: each takes its own share of the buffer."""

    def made(shape: CollectiveShape) -> CollectiveSchedule:
        one = make(shape.ranks, shape.elements)
        if shape.channels == 1:
            return one
        chunks = len(one.sizes)

        def program(rank: int, channel: int) -> list[tuple[Transfer, ...]]:
            return [
                tuple(replace(transfer, chunk=transfer.chunk + channel * chunks) for transfer in step)
                for step in one.steps(rank, 0)
            ]

        sizes = EvenSizes(shape.elements, chunks * shape.channels)
        return replace(one, sizes=sizes, program=program, channels=shape.channels)

    return made


_ALL: Mapping[str, Mapping[str, Make]] = {
    "all_reduce": {
        "ring": lambda s: ring.ring_all_reduce(s.ranks, s.elements, s.channels, s.pieces),
        "tree": lambda s: trees.double_binary_tree(
            s.ranks, s.elements, s.pieces, s.node_size, max(2, s.channels)
        ),
        "recursive-doubling": _in_channels(hypercube.recursive_doubling_all_reduce),
        "halving-doubling": _in_channels(hypercube.halving_doubling_all_reduce),
        "butterfly": _in_channels(
            lambda ranks, elements: hypercube.butterfly("all_reduce", ranks, EvenSizes(elements, ranks))
        ),
        "two-level": lambda s: _in_channels(
            lambda ranks, elements: levels.two_level_all_reduce(ranks, elements, s.node_size)
        )(s),
        "multi-ring": lambda s: levels.multi_ring_all_reduce(s.ranks, s.elements, s.node_size, s.pieces),
        "one-shot": _in_channels(hypercube.one_shot_all_reduce),
        "two-shot": _in_channels(
            lambda n, elements: hypercube.butterfly("all_reduce", n, EvenSizes(elements, n), (n,), "two-shot")
        ),
        "sharp": lambda s: trees.in_switch(s.ranks, s.elements, s.radix, s.channels * s.pieces),
    },
    "all_gather": {
        "ring": lambda s: _ring("all_gather", Move.COPY, s),
        "bruck": lambda s: hypercube.bruck_all_gather(s.ranks, _one_each(s)),
        "butterfly": lambda s: hypercube.butterfly("all_gather", s.ranks, _one_each(s)),
        "direct": lambda s: hypercube.butterfly("all_gather", s.ranks, _one_each(s), (s.ranks,), "direct"),
    },
    "reduce_scatter": {
        "ring": lambda s: _ring("reduce_scatter", Move.REDUCE, s),
        "butterfly": lambda s: hypercube.butterfly("reduce_scatter", s.ranks, _one_each(s)),
        "direct": lambda s: hypercube.butterfly(
            "reduce_scatter", s.ranks, _one_each(s), (s.ranks,), "direct"
        ),
    },
    "broadcast": {
        "chain": lambda s: trees.chain("broadcast", s.ranks, s.elements, s.root, s.pieces, s.channels),
        "binomial": lambda s: trees.binomial("broadcast", s.ranks, s.elements, s.root),
    },
    "reduce": {
        "chain": lambda s: trees.chain("reduce", s.ranks, s.elements, s.root, s.pieces, s.channels),
        "binomial": lambda s: trees.binomial("reduce", s.ranks, s.elements, s.root),
    },
    "all_to_all": {
        "pairwise": lambda s: levels.pairwise_all_to_all(s.ranks, _pairs(s)),
        "direct": lambda s: levels.direct_all_to_all(s.ranks, _pairs(s)),
        "bruck": lambda s: levels.bruck_all_to_all(s.ranks, _pairs(s)),
        "two-level": lambda s: levels.two_level_all_to_all(s.ranks, _pairs(s), s.node_size),
    },
    "barrier": {"dissemination": lambda s: hypercube.dissemination_barrier(s.ranks)},
}


def algorithms(collective: Collective) -> tuple[str, ...]:
    return tuple(_ALL[collective])


def make_schedule(collective: str, algorithm: str, shape: CollectiveShape) -> CollectiveSchedule:
    """Refuses names that do not exist and shapes that the algorithm cannot serve."""
    if collective not in _ALL:
        raise ConfigError(f"there is no collective {collective!r}{did_you_mean(collective, _ALL)}")
    made = _ALL[collective]
    if algorithm not in made:
        raise ConfigError(f"there is no {collective} algorithm {algorithm!r}{did_you_mean(algorithm, made)}")
    if shape.ranks < 1 or shape.elements < 0 or shape.channels < 1 or shape.pieces < 1:
        raise ConfigError(
            f"a collective needs 1 or more ranks, channels and pieces and no negative size, got {shape}"
        )
    return made[algorithm](shape)
