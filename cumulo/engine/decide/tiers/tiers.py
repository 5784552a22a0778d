"""Tiers: the books of KV blocks beyond the device. Owned by residency; carried out by the runner's block copies
and, for files, by play/tiers/mover.py.

A block that is evicted on the device is copied to host memory in the step that overwrites it (`StepPlan.swap_out`),
and back by `swap_in`. It can be found there only after that step was played, so that a step that failed leaves
nothing wrong behind. What has come to host memory is written to disk in the background.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from cumulo.engine.decide.block_pool import BlockHash
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.request import Sequence
from cumulo.engine.decide.tiers.choice import TierCosts
from cumulo.engine.decide.tiers.host_tier import HostTier

KEPT_FILES = 0.95  # of the disk's limit is left when files are deleted, so that it is not done for every file
_MOST_WRITES = 64  # ordered and not done: a disk that is slower than the device evicts gets every nth block


class WriteFile(NamedTuple):
    """Order: write this host block to disk. It is pinned until the answer comes."""

    block_hash: BlockHash
    block: int


class ReadFiles(NamedTuple):
    """Order: read these blocks into host memory."""

    number: int
    hashes: tuple[BlockHash, ...]
    blocks: tuple[int, ...]


class FileWritten(NamedTuple):
    block_hash: BlockHash
    block: int
    ok: bool


class FilesRead(NamedTuple):
    number: int
    good: tuple[bool, ...]  # one for each hash: read, and what it should be
    seconds: float


class FilesSeen(NamedTuple):
    """Files of this model that other engines, or an earlier run, have left, and such as are gone."""

    came: tuple[BlockHash, ...]
    went: tuple[BlockHash, ...]


TierOrder = WriteFile | ReadFiles
TierEvent = FileWritten | FilesRead | FilesSeen


class Arriving(NamedTuple):
    """Blocks of a sequence that a step brings back from host memory."""

    sequence: Sequence
    first: int  # index of the first of them in its table
    blocks: list[int]  # of the host


@dataclass(slots=True)
class _Unplayed:
    """What one plan moves."""

    spilled: list[tuple[BlockHash, int]] = field(default_factory=list)
    arriving: list[Arriving] = field(default_factory=list)


@dataclass(slots=True)
class TierReading:
    """Files on their way to host memory, and who waits for them."""

    order: ReadFiles
    waiters: list[Sequence]
    tokens: int
    compute_s: float  # that reading them saves


@dataclass(slots=True)
class TierCounts:
    """Since the engine began."""

    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    spilled_blocks: int = 0  # device to host memory
    fetched_blocks: int = 0  # host memory to device
    written_blocks: int = 0  # host memory to disk
    read_blocks: int = 0  # disk to host memory
    failed_writes: int = 0
    bad_files: int = 0  # damaged, or of another model


class Tiers:
    def __init__(self, first_host_block: int, host_blocks: int, disk: bool) -> None:
        self.host = HostTier(first_host_block, host_blocks)
        self.disk = disk
        self.on_disk: set[BlockHash] = set()
        self.costs, self.counts = TierCosts(), TierCounts()
        self.orders: list[TierOrder] = []  # the mover empties it
        self.reading: dict[int, TierReading] = {}
        self.writing = 0
        self._unplayed: dict[int, _Unplayed] = {}
        self._numbers = 0

    # -- device and host memory ---------------------------------------------------------------------------
    def run_of(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Host blocks of the longest prefix of this hash chain."""
        found = []
        for block_hash in hashes:
            block = self.host.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def spill(self, evicted: list[tuple[BlockHash, int]], plan: StepPlan) -> None:
        """Device blocks that this plan overwrites go to host memory, unless they are there."""
        for block_hash, block in evicted:
            if self.host.find(block_hash) is not None:
                self.host.touch(block_hash)
            elif (target := self.host.take_block()) is not None:
                plan.swap_out.append((block, target))
                self._of(plan).spilled.append((block_hash, target))

    def hold(self, sequence: Sequence, first: int, blocks: list[int], plan: StepPlan) -> None:
        """These host blocks are read by this plan."""
        for block_hash, block in zip(sequence.hashes[first:], blocks, strict=False):
            self.host.touch(block_hash)
            self.host.pin(block)
        self._of(plan).arriving.append(Arriving(sequence, first, blocks))
        self.counts.fetched_blocks += len(blocks)

    def played(self, index: int) -> list[Arriving]:
        """A plan's copies are done; returns what the device holds since."""
        done = self._unplayed.pop(index, None)
        if done is None:
            return []
        for block_hash, block in done.spilled:
            if self.host.put(block_hash, block):
                self.counts.spilled_blocks += 1
                self._write(block_hash, block)
        self._release(done)
        return done.arriving

    def failed(self, index: int) -> None:
        """The runner could not play a plan: nobody knows what its copies did."""
        done = self._unplayed.pop(index, None)
        if done is not None:
            for _, block in done.spilled:
                self.host.give_back(block)
            self._release(done)

    def _release(self, done: _Unplayed) -> None:
        for arriving in done.arriving:
            for block in arriving.blocks:
                self.host.unpin(block)

    def _of(self, plan: StepPlan) -> _Unplayed:
        return self._unplayed.setdefault(plan.index, _Unplayed())

    # -- host memory and disk -----------------------------------------------------------------------------
    def _write(self, block_hash: BlockHash, block: int) -> None:
        if self.disk and block_hash not in self.on_disk and self.writing < _MOST_WRITES:
            self.writing += 1
            self.host.pin(block)
            self.orders.append(WriteFile(block_hash, block))

    def order_reading(
        self, hashes: list[BlockHash], sequence: Sequence, tokens: int, compute_s: float
    ) -> bool:
        """Read these from disk for a sequence; False: host memory has no room for any."""
        blocks = []
        for _ in hashes:
            block = self.host.take_block()
            if block is None:
                break
            blocks.append(block)
        if not blocks:
            return False
        self._numbers += 1
        order = ReadFiles(self._numbers, tuple(hashes[: len(blocks)]), tuple(blocks))
        self.reading[order.number] = TierReading(order, [sequence], tokens, compute_s)
        self.orders.append(order)
        return True

    def enter_written(self, event: FileWritten) -> None:
        self.writing -= 1
        self.host.unpin(event.block)
        if event.ok:
            self.counts.written_blocks += 1
            self.on_disk.add(event.block_hash)
        else:
            self.counts.failed_writes += 1

    def enter_read(self, event: FilesRead) -> TierReading:
        reading = self.reading.pop(event.number)
        good = 0
        for block_hash, block, is_good in zip(
            reading.order.hashes, reading.order.blocks, event.good, strict=True
        ):
            if is_good:
                good += 1
                self.host.put(block_hash, block)
            else:
                self.host.give_back(block)
                self.on_disk.discard(block_hash)
                self.counts.bad_files += 1
        self.counts.read_blocks += good
        self.costs.observe_disk(len(event.good), event.seconds)
        return reading

    def enter_seen(self, event: FilesSeen) -> None:
        self.on_disk.update(event.came)
        self.on_disk.difference_update(event.went)

    def problems(self) -> list[str]:
        taken = sum(len(one.spilled) for one in self._unplayed.values())
        taken += sum(len(one.order.blocks) for one in self.reading.values())
        return self.host.problems(taken)
