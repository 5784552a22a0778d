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

    def __init__(self, first: int, count: int) -> None:
        """Host blocks [first, first + count); those before are the swap pool's."""
        self.first, self.count = first, count
        self.block_of: OrderedDict[BlockHash, int] = OrderedDict()
        self.evictions = 0
        self._free = list(range(first + count - 1, first - 1, -1))
        self._pins: Counter[int] = Counter()

    def find(self, block_hash: BlockHash) -> int | None:
        return self.block_of.get(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        self.block_of.move_to_end(block_hash)

    def take_block(self) -> int | None:
        """A block for something else: a free one, or the least recently used. The caller pins or puts it."""
        if self._free:
            return self._free.pop()
        for block_hash, block in self.block_of.items():
            if not self._pins[block]:
                del self.block_of[block_hash]
                self.evictions += 1
                return block
        return None

    def put(self, block_hash: BlockHash, block: int) -> bool:
        """What was taken now holds this; False: there is such a block already, and this one is free again."""
        if block_hash in self.block_of:
            self.give_back(block)
            return False
        self.block_of[block_hash] = block
        return True

    def give_back(self, block: int) -> None:
        self._free.append(block)

    def pin(self, block: int) -> None:
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]

    def problems(self, on_their_way: int) -> list[str]:
        """`on_their_way`: blocks taken that hold nothing yet."""
        held = [*self.block_of.values(), *self._free]
        if len(set(held)) != len(held) or len(held) + on_their_way != self.count:
            return [f"host tier blocks are lost or doubled: {len(held)} and {on_their_way} of {self.count}"]
        return []


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
    """The blocks that one plan moves."""

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
        self.host = HostTier(config.host_blocks, config.tier_blocks)
        self.disk = config.disk
        self.on_disk: set[BlockHash] = set()
        self.counts = TierCounts()
        self.disk_s_per_block = 2e-3  # measured while the engine runs
        self.orders: list[TierOrder] = []  # the mover empties it
        self.reading: dict[int, TierReading] = {}
        self.writing = 0
        self._unplayed: dict[int, _Unplayed] = {}
        self._numbers = 0
        self._evicted: list[tuple[BlockHash, int]] = []
        batch.pool.evicted = self._evicted
        batch.kv.written_by_others = True

    # -- the points of a step -----------------------------------------------------------------------------
    def hold_back(self, sequence: Sequence, now_s: float) -> bool:
        """Have the sequence's prefix read from disk where that is sooner than computing it."""
        return (
            bool(self.on_disk or self.reading)
            and self._batch.pool.prefix_cache
            and self._fetch(sequence, now_s)
        )

    def tokens_elsewhere(self, sequence: Sequence, cached: int) -> int:
        size = self._batch.pool.block_size
        return len(self._in_host_memory(sequence, cached // size)) * size

    def admitted(self, sequence: Sequence, cached: int, plan: StepPlan, now_s: float) -> int:
        """Blocks in host memory that continue the cached ones are moved to the device by this plan."""
        if sequence.computed != cached:
            return 0  # its own blocks were swapped in
        size = self._batch.pool.block_size
        first = cached // size
        blocks = self._in_host_memory(sequence, first)
        if not blocks:
            return 0
        self.hold(sequence, first, blocks, plan)
        plan.swap_in.extend(zip(blocks, sequence.blocks[first:], strict=False))
        sequence.computed += len(blocks) * size
        self._tell_fetched(sequence, len(blocks), now_s)
        return len(blocks) * size

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        if self._evicted:
            self.spill(self._evicted, plan)
            self._evicted.clear()

    def observe(self, plan: StepPlan, timing: StepTiming, now_s: float) -> None:
        """A step's copies between tiers are done: what came back can be shared."""
        size = self._batch.pool.block_size
        for sequence, first, blocks in self.played(plan.index):
            end = (first + len(blocks)) * size
            if sequence.state == State.RUNNING and sequence.computed >= end:
                self._batch.kv.register_blocks(sequence, first * size, end)

    def step_failed(self, plan: StepPlan, now_s: float) -> None:
        self.failed(plan.index)

    # -- what a sequence gets -----------------------------------------------------------------------------
    def _in_host_memory(self, sequence: Sequence, cached: int) -> list[int]:
        """Host blocks that continue a sequence's cached ones, where moving them is sooner than computing them."""
        batch, size = self._batch, self._batch.pool.block_size
        is_sooner = batch.kv.costs.swap_s_per_block < size * batch.kv.costs.prompt_s_per_token
        if sequence.host_blocks or not batch.pool.prefix_cache or not is_sooner:
            return []
        hashes = sequence.extend_hashes(batch.kv.usable_blocks(sequence), size)
        found = []
        for block_hash in hashes[cached:]:
            block = self.host.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _tell_fetched(self, sequence: Sequence, blocks: int, now_s: float) -> None:
        """What came from host memory; what was read from disk before that has been told."""
        costs, story = self._batch.kv.costs, sequence.request.story
        if any(event.kind == "fetched" for event in story.events):
            return
        tokens = blocks * self._batch.config.block_size
        self.counts.host_hit_tokens += tokens
        story.add(
            now_s, "fetched", where="in host memory", tokens=tokens, fetch_ms=1e3 * blocks * costs.swap_s_per_block,
            compute_ms=1e3 * tokens * costs.prompt_s_per_token,
        )  # fmt: skip

    def _fetch(self, sequence: Sequence, now_s: float) -> bool:
        batch, host, story = self._batch, self.host, sequence.request.story
        size = batch.config.block_size
        hashes = sequence.extend_hashes(batch.kv.usable_blocks(sequence), size)
        device = len(batch.pool.cached_prefix(hashes))
        wanted, held = list[bytes](), list[int]()
        for block_hash in hashes[device:]:
            if (block := host.find(block_hash)) is not None:
                held.append(block)
                host.touch(block_hash)
            elif block_hash in self.on_disk:
                wanted.append(block_hash)
            else:
                break
        if (joined := self._being_read(wanted)) is not None:
            self.reading[joined].waiters.append(sequence)
            story.wait_for(now_s, "kv_fetch")
            return True
        if not wanted:
            return False
        tokens, costs = len(wanted) * size, batch.kv.costs
        ahead = sum(len(one.order.blocks) for one in self.reading.values())  # blocks that are read before
        fetch_s = (ahead + len(wanted)) * self.disk_s_per_block + len(wanted) * costs.swap_s_per_block
        compute_s = tokens * costs.prompt_s_per_token
        if fetch_s >= compute_s:
            story.add(now_s, "not_fetched", tokens=tokens, fetch_ms=1e3 * fetch_s, compute_ms=1e3 * compute_s)
            return False
        for block in held:  # what is here already must not make room for what comes
            host.pin(block)
        ordered = self._order_reading(wanted, sequence, compute_s)
        for block in held:
            host.unpin(block)
        if ordered:
            story.wait_for(now_s, "kv_fetch")
        return ordered

    def _being_read(self, wanted: list[BlockHash]) -> int | None:
        """A reading under way that begins as this would."""
        for number, one in self.reading.items():
            if wanted and wanted[0] in one.order.hashes:
                return number
        return None

    # -- news of the disk ---------------------------------------------------------------------------------
    def enter_event(self, event: TierEvent, now_s: float) -> None:
        if isinstance(event, FileWritten):
            self._enter_written(event)
        elif isinstance(event, FilesSeen):
            self.on_disk.update(event.came)
            self.on_disk.difference_update(event.went)
        else:
            self._enter_read(event, now_s)

    def _enter_written(self, event: FileWritten) -> None:
        self.writing -= 1
        self.host.unpin(event.block)
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
                self.host.give_back(block)
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

    # -- device and host memory ---------------------------------------------------------------------------
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

    def _order_reading(self, hashes: list[BlockHash], sequence: Sequence, compute_s: float) -> bool:
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
        self.reading[order.number] = TierReading(order, [sequence], compute_s)
        self.orders.append(order)
        return True

    def problems(self, owned: list[list[int]]) -> list[str]:
        taken = sum(len(one.spilled) for one in self._unplayed.values())
        taken += sum(len(one.order.blocks) for one in self.reading.values())
        return self.host.problems(taken)
