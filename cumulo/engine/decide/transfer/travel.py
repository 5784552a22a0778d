"""TransferPlan: which KV blocks travel from one engine to another, and in which order. Made by the scheduler of a
decode engine; the transfer threads and the simulator follow it."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class BlockRun(NamedTuple):
    """Blocks that follow one another in both caches: one copy."""

    source: int
    target: int
    blocks: int


class BlockRuns(NamedTuple):
    """Runs that are copied one after the other. Every layer of a transfer asks for the same ones, so what a copy
    needs to know of them is worked out once."""

    runs: tuple[BlockRun, ...]
    words: "array[int]"  # source, target and blocks of each, as 64-bit integers
    source_end: int  # no block at or beyond it is read
    target_end: int
    blocks: int

    @staticmethod
    def joined(pairs: Iterable[tuple[int, int]]) -> "BlockRuns":
        """Blocks by source and target, neighbours in one run."""
        found: list[BlockRun] = []
        first = to = blocks = 0  # of the run that is growing
        for source, target in pairs:
            if blocks and source == first + blocks and target == to + blocks:
                blocks += 1
                continue
            if blocks:
                found.append(BlockRun(first, to, blocks))
            first, to, blocks = source, target, 1
        if blocks:
            found.append(BlockRun(first, to, blocks))
        return BlockRuns(
            tuple(found),
            array("q", [number for run in found for number in run]),
            max((run.source + run.blocks for run in found), default=0),
            max((run.target + run.blocks for run in found), default=0),
            sum(run.blocks for run in found),
        )


class LayerPiece(NamedTuple):
    """What is copied at once: runs of blocks of one layer, keys and values."""

    layer: int
    runs: BlockRuns


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Whose KV goes from which blocks to which. Layers in order, and within a layer blocks in order: what is
    computed first is copied first."""

    number: int  # of the order, which the receiver counts
    source: str  # the engine that computes
    layers: int
    block_size: int
    tokens: int  # computed there
    held_blocks: int  # the receiver has these already, by their hashes: they are not sent
    sources: tuple[int, ...]  # the sender's blocks of all tokens
    targets: tuple[int, ...]  # the receiver's, from `held_blocks` on

    @property
    def blocks(self) -> int:
        return len(self.targets)

    def runs(self, first: int, end: int) -> BlockRuns:
        """Blocks [first, end) of the sequence."""
        held = self.held_blocks
        return BlockRuns.joined(
            zip(self.sources[first:end], self.targets[first - held : end - held], strict=True)
        )


class TransferProgress:
    """How far a transfer is: what the sender has computed, and what of it has been copied."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self._ready = [0] * plan.layers  # blocks that are complete at the source
        self._copied = [plan.held_blocks] * plan.layers
        self._runs: dict[tuple[int, int], BlockRuns] = {}  # layers are cut alike: joined once for all
        self._behind = 0  # layers before it have nothing to copy

    def computed(self, layers: int, tokens: int) -> None:
        """The first `layers` layers have the KV of the first `tokens` tokens. A block is sent when it is full, the
        last one when everything is computed."""
        plan = self.plan
        blocks = len(plan.sources) if tokens >= plan.tokens else tokens // plan.block_size
        for layer in range(layers):
            if blocks > self._ready[layer]:
                self._ready[layer] = blocks
        self._behind = 0

    def next_piece(self, most_blocks: int) -> LayerPiece | None:
        """What to copy now, or None until more has been computed."""
        for layer in range(self._behind, self.plan.layers):
            ready, copied = self._ready[layer], self._copied[layer]
            if copied < ready:
                self._behind = layer
                end = min(ready, copied + most_blocks)
                self._copied[layer] = end
                runs = self._runs.get((copied, end))
                if runs is None:
                    runs = self._runs[copied, end] = self.plan.runs(copied, end)
                return LayerPiece(layer, runs)
        return None

    @property
    def complete_blocks(self) -> int:
        """Blocks of the sequence, from its first, that are here in all layers."""
        return min(self._copied)

    @property
    def done(self) -> bool:
        return self.complete_blocks == len(self.plan.sources)
