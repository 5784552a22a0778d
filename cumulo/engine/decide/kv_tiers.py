"""Tiers: KV blocks beyond the device, in host memory and on disk, as an extension of the scheduler. Carried out by
the runner's block copies and, for files, by play/tiers.

A block that is evicted on the device is copied to host memory in the step that overwrites it (`StepPlan.swap_out`),
and back by `swap_in`. It can be found there only after that step was played, so that a step that failed leaves
nothing wrong behind. What has come to host memory is written to disk in the background.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.engine.decide.core.extension import Extension, Flight, StepTiming
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.plan import StepPlan

_LEARN = 0.2


class HostTier:
    """Least recently used first, as on the device. A block is pinned while a step in flight or a file reads or
    writes it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.block_of: OrderedDict[BlockHash, int] = OrderedDict()
        self.free = list(range(count - 1, -1, -1))
        self.pins = Counter[int]()  # by block
        self.evictions = 0

    def take_block(self) -> int | None:
        """A block for something else: a free one, or the least recently used. The caller pins or puts it."""
        if self.free:
            return self.free.pop()
        for block_hash, block in self.block_of.items():
            if not self.pins[block]:
                del self.block_of[block_hash]
                self.evictions += 1
                return block
        return None

    def put(self, block_hash: BlockHash, block: int) -> bool:
        """What was taken now holds this; False: there is such a block already, and this one is free again."""
        if block_hash in self.block_of:
            self.free.append(block)
            return False
        self.block_of[block_hash] = block
        return True


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
class _Moves:
    """The blocks that one plan moves, until it was played."""

    spilled: list[tuple[BlockHash, int]] = field(default_factory=list)
    arriving: list[Arriving] = field(default_factory=list)


@dataclass(slots=True)
class TierReading:
    """Files on their way to host memory, and who waits for them."""

    order: ReadFiles
    waiters: list[Sequence]
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


class Tiers(Extension):
    def __init__(self, batch: RequestBatch) -> None:
        config = batch.config
        self._batch = batch
        self.host = HostTier(config.tier_blocks)
        self.disk = config.disk
        self.on_disk: set[BlockHash] = set()
        self.counts = TierCounts()
        self.disk_s_per_block = 2e-3  # measured while the engine runs
        self.orders: list[TierOrder] = []  # the mover empties it
        self.reading: dict[int, TierReading] = {}
        self.writing = 0
        self._moves: dict[int, _Moves] = {}
        self._numbers = 0
        self._evicted: list[tuple[BlockHash, int]] = []
        batch.pool.evicted = self._evicted
        batch.kv.written_by_others = True

    # -- the points of a step -----------------------------------------------------------------------------
    def hold_back(self, sequence: Sequence, now_s: float) -> bool:
        """Have the sequence's prefix read from disk where that is sooner than computing it."""
        batch, host, story = self._batch, self.host, sequence.request.story
        if not (self.on_disk or self.reading) or not batch.pool.prefix_cache:
            return False
        size, costs = batch.config.block_size, batch.kv.costs
        hashes = sequence.extend_hashes(batch.kv.usable_blocks(sequence), size)
        wanted, held = list[BlockHash](), list[int]()
        for block_hash in hashes[len(batch.pool.cached_prefix(hashes)) :]:
            if (block := host.block_of.get(block_hash)) is not None:
                held.append(block)
                host.block_of.move_to_end(block_hash)
            elif block_hash in self.on_disk:
                wanted.append(block_hash)
            else:
                break
        if not wanted:
            return False
        for under_way in self.reading.values():
            if wanted[0] in under_way.order.hashes:
                under_way.waiters.append(sequence)
                story.wait_for(now_s, "kv_fetch")
                return True
        tokens = len(wanted) * size
        ahead = sum(len(one.order.blocks) for one in self.reading.values())  # blocks that are read before
        fetch_s = (ahead + len(wanted)) * self.disk_s_per_block + len(wanted) * costs.swap_s_per_block
        compute_s = tokens * costs.prompt_s_per_token
        if fetch_s >= compute_s:
            story.add(now_s, "not_fetched", tokens=tokens, fetch_ms=1e3 * fetch_s, compute_ms=1e3 * compute_s)
            return False
        for block in held:  # what is here already must not make room for what comes
            host.pins[block] += 1
        blocks = [block for _ in wanted if (block := host.take_block()) is not None]
        for block in held:
            host.pins[block] -= 1
        if not blocks:
            return False
        self._numbers += 1
        order = ReadFiles(self._numbers, tuple(wanted[: len(blocks)]), tuple(blocks))
        self.reading[order.number] = TierReading(order, [sequence], compute_s)
        self.orders.append(order)
        story.wait_for(now_s, "kv_fetch")
        return True

    def tokens_elsewhere(self, sequence: Sequence, cached: int) -> int:
        size = self._batch.pool.block_size
        return len(self._in_host_memory(sequence, cached // size)) * size

    def admitted(self, sequence: Sequence, cached: int, plan: StepPlan, now_s: float) -> int:
        """Blocks in host memory that continue the cached ones are moved to the device by this plan."""
        size = self._batch.pool.block_size
        first = cached // size
        blocks = self._in_host_memory(sequence, first)
        if not blocks:
            return 0
        for block_hash, block in zip(sequence.hashes[first:], blocks, strict=False):
            self.host.block_of.move_to_end(block_hash)
            self.host.pins[block] += 1
        self._of(plan).arriving.append(Arriving(sequence, first, blocks))
        self.counts.fetched_blocks += len(blocks)
        plan.swap_in.extend(zip(blocks, sequence.blocks[first:], strict=False))
        tokens = len(blocks) * size
        sequence.computed += tokens
        costs, story = self._batch.kv.costs, sequence.request.story
        if all(
            event.kind != "fetched" for event in story.events
        ):  # else it was read from disk, and that was told
            self.counts.host_hit_tokens += tokens
            story.add(
                now_s, "fetched", where="in host memory", tokens=tokens,
                fetch_ms=1e3 * len(blocks) * costs.swap_s_per_block,
                compute_ms=1e3 * tokens * costs.prompt_s_per_token,
            )  # fmt: skip
        return tokens

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        if self._evicted:
            self.spill(self._evicted, plan)
            self._evicted.clear()

    def observe(self, plan: StepPlan, timing: StepTiming, now_s: float) -> None:
        self.played(plan.index)

    def step_failed(self, plan: StepPlan, now_s: float) -> None:
        moves = self._moves.pop(plan.index, _Moves())
        for _, block in moves.spilled:
            self.host.free.append(block)
        self._unpin(moves)

    def _in_host_memory(self, sequence: Sequence, cached: int) -> list[int]:
        """Host blocks that continue a sequence's cached ones, where moving them is sooner than computing them."""
        batch, size = self._batch, self._batch.pool.block_size
        is_sooner = batch.kv.costs.swap_s_per_block < size * batch.kv.costs.prompt_s_per_token
        if not batch.pool.prefix_cache or not is_sooner:
            return []
        hashes = sequence.extend_hashes(batch.kv.usable_blocks(sequence), size)
        found = []
        for block_hash in hashes[cached:]:
            block = self.host.block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    # -- news of the disk ---------------------------------------------------------------------------------
    def enter_event(self, event: TierEvent, now_s: float) -> None:
        if isinstance(event, FilesRead):
            self._enter_read(event, now_s)
        elif isinstance(event, FilesSeen):
            self.on_disk.update(event.came)
            self.on_disk.difference_update(event.went)
        else:
            self.writing -= 1
            self.host.pins[event.block] -= 1
            if event.ok:
                self.counts.written_blocks += 1
                self.on_disk.add(event.block_hash)
            else:
                self.counts.failed_writes += 1

    def _enter_read(self, event: FilesRead, now_s: float) -> None:
        reading = self.reading.pop(event.number)
        good, size = sum(event.good), self._batch.config.block_size
        for block_hash, block, is_good in zip(
            reading.order.hashes, reading.order.blocks, event.good, strict=True
        ):
            if is_good:
                self.host.put(block_hash, block)
            else:
                self.host.free.append(block)
                self.on_disk.discard(block_hash)
                self.counts.bad_files += 1
        self.counts.read_blocks += good
        if event.seconds > 0:
            self.disk_s_per_block += _LEARN * (event.seconds / len(event.good) - self.disk_s_per_block)
        for sequence in reading.waiters:
            if sequence.state != State.WAITING or sequence.queued:
                continue  # it has ended meanwhile
            story = sequence.request.story
            if good:
                self.counts.disk_hit_tokens += good * size
                story.add(
                    now_s, "fetched", where="on disk", tokens=good * size, fetch_ms=1e3 * event.seconds,
                    compute_ms=1e3 * reading.compute_s * good / len(event.good),
                )  # fmt: skip
            if good < len(event.good):
                story.add(now_s, "bad_files", files=len(event.good) - good)
            self._batch.queue.push(sequence)
            story.wait_for(now_s, "behind_others")

    # -- device, host memory and disk ---------------------------------------------------------------------
    def spill(self, evicted: list[tuple[BlockHash, int]], plan: StepPlan) -> None:
        """Device blocks that this plan overwrites go to host memory, unless they are there."""
        for block_hash, block in evicted:
            if block_hash in self.host.block_of:
                self.host.block_of.move_to_end(block_hash)
            elif (target := self.host.take_block()) is not None:
                plan.swap_out.append((block, target))
                self._of(plan).spilled.append((block_hash, target))

    def played(self, index: int) -> None:
        """A plan's copies are done: what they brought to either side can be found there, and goes on to disk."""
        size, moves = self._batch.pool.block_size, self._moves.pop(index, _Moves())
        for block_hash, block in moves.spilled:
            if self.host.put(block_hash, block):
                self.counts.spilled_blocks += 1
                if self.disk and block_hash not in self.on_disk and self.writing < _MOST_WRITES:
                    self.writing += 1
                    self.host.pins[block] += 1
                    self.orders.append(WriteFile(block_hash, block))
        for sequence, first, blocks in moves.arriving:
            end = (first + len(blocks)) * size
            if sequence.state == State.RUNNING and sequence.computed >= end:
                self._batch.kv.register_blocks(sequence, first * size, end)
        self._unpin(moves)

    def _unpin(self, moves: _Moves) -> None:
        for arriving in moves.arriving:
            for block in arriving.blocks:
                self.host.pins[block] -= 1

    def _of(self, plan: StepPlan) -> _Moves:
        return self._moves.setdefault(plan.index, _Moves())
