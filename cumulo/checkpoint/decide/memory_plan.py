"""Who keeps whose copy in memory, and who fetches what from whom afterwards. Pure; played by `memory.py`.

A node's memory holds its own ranks' files and those of the node before it (Wang et al. 2023, Gemini: a ring of
groups of two), so that the loss of any one node loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cumulo.layout.pieces import Box


@dataclass(frozen=True, slots=True, order=True)
class MemoryFile:
    """What one rank of a run of `world` ranks kept at a step."""

    step: int
    world: int
    rank: int

    @property
    def name(self) -> str:
        return f"step-{self.step:09d}.rank-{self.rank:05d}-of-{self.world:05d}.safetensors"


def file_of(name: str) -> MemoryFile | None:
    """The file of that name; None: it is none of ours, or unfinished."""
    parts = name.removesuffix(".safetensors").replace(".", "-").split("-")
    if not name.endswith(".safetensors") or len(parts) != 6 or parts[0] != "step":
        return None
    found = MemoryFile(int(parts[1]), int(parts[5]), int(parts[3]))
    return found if found.name == name else None


def keepers(nodes: Sequence[str]) -> tuple[int | None, ...]:
    """For each rank the rank on another node that keeps its copy; `nodes` says where each rank is."""
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return (None,) * len(nodes)
    ranks = {node: [rank for rank, at in enumerate(nodes) if at == node] for node in order}
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        there = ranks[order[(order.index(node) + 1) % len(order)]]
        found.append(there[ranks[node].index(rank) % len(there)])
    return tuple(found)


def freshest(have: Sequence[frozenset[MemoryFile]]) -> tuple[MemoryFile, ...]:
    """The files of the latest step that nobody's file is missing of; empty: there is none. `have`: by rank."""
    everything = frozenset().union(*have)
    runs = sorted({(file.step, file.world) for file in everything}, reverse=True)
    for step, world in runs:
        files = tuple(MemoryFile(step, world, rank) for rank in range(world))
        if everything.issuperset(files):
            return files
    return ()


@dataclass(frozen=True, slots=True)
class Fetch:
    file: MemoryFile
    source: int  # the rank that sends it
    target: int  # the rank that puts it into its node's memory


def fetches(
    nodes: Sequence[str],
    have: Sequence[frozenset[MemoryFile]],
    need: Sequence[frozenset[MemoryFile]],
) -> tuple[Fetch, ...]:
    """Everything that must travel, in the order in which all ranks go through it: each file once to each node."""
    sources = providers(have)
    found: list[Fetch] = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, at in enumerate(nodes) if at == node]
        wanted = frozenset().union(*(need[rank] for rank in ranks)) - frozenset().union(
            *(have[rank] for rank in ranks)
        )
        found += [Fetch(file, sources[file], ranks[0]) for file in sorted(wanted)]
    return tuple(found)


def providers(have: Sequence[frozenset[MemoryFile]]) -> Mapping[MemoryFile, int]:
    """The first rank that has a file, by file."""
    found: dict[MemoryFile, int] = {}
    for rank, files in enumerate(have):
        for file in files:
            found.setdefault(file, rank)
    return found


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of a whole tensor have in common: `offset` in the whole, `at` within `one`."""
    begin = tuple(map(max, one.offset, other.offset))
    end = tuple(
        min(a + m, b + n) for a, m, b, n in zip(one.offset, one.size, other.offset, other.size, strict=True)
    )
    size = tuple(last - first for first, last in zip(begin, end, strict=True))
    if any(length <= 0 for length in size):
        return None
    return Box(begin, size, tuple(first - at for first, at in zip(begin, one.offset, strict=True)))
