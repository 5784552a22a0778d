"""SimulatedDisk: the KV tier's files in virtual time. Asked by a simulated engine between two steps.

What is written and read, and whether to read at all, is decided by the scheduler's own tiers
(engine/decide/kv_tiers.py); here is only how long it takes. Like the mover's (play/disk_tier.py), one thread
writes and another reads, one order after the other, and no step waits for them.
"""

import heapq
import itertools
from collections import OrderedDict

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.engine.decide.kv_tiers import (
    KEPT_FILES,
    FilesRead,
    FilesSeen,
    FileWritten,
    ReadFiles,
    TierEvent,
    TierOrder,
    Tiers,
)
from cumulo.errors import ConfigError


class SimulatedDisk:
    def __init__(self, read_s: float, write_s: float, most_blocks: int) -> None:
        """Seconds for one block, and how many blocks there is room for."""
        if most_blocks < 1:
            raise ConfigError("the disk tier has no room for a single KV block: give it more GiB")
        self._read_s, self._write_s, self._most = read_s, write_s, most_blocks
        self._files: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._reader_free_s = self._writer_free_s = 0.0
        self._under_way: list[tuple[float, int, TierOrder, float]] = []  # when done, number, order, seconds
        self._numbers = itertools.count()

    @property
    def next_s(self) -> float:
        """When the next order is done; infinity: none is under way."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def exchange(self, tiers: Tiers | None, now_s: float) -> None:
        """Take in what was written and read, and begin what is ordered."""
        if tiers is None:
            return
        while self._under_way and self._under_way[0][0] <= now_s:
            _, _, order, seconds = heapq.heappop(self._under_way)
            for event in self._done(order, seconds):
                tiers.enter_event(event, now_s)
        for order in tiers.orders:
            if isinstance(order, ReadFiles):
                seconds = self._read_s * len(order.blocks)
                self._reader_free_s = done_s = max(self._reader_free_s, now_s) + seconds
            else:
                seconds = self._write_s
                self._writer_free_s = done_s = max(self._writer_free_s, now_s) + seconds
            heapq.heappush(self._under_way, (done_s, next(self._numbers), order, seconds))
        tiers.orders.clear()

    def finish(self, tiers: Tiers | None, now_s: float) -> None:
        """Whatever is ordered is done, as if there were time for it."""
        self.exchange(tiers, now_s)
        self.exchange(tiers, float("inf"))

    def _done(self, order: TierOrder, seconds: float) -> list[TierEvent]:
        if isinstance(order, ReadFiles):
            good = tuple(block_hash in self._files for block_hash in order.hashes)
            for block_hash in order.hashes:
                if block_hash in self._files:
                    self._files.move_to_end(block_hash)
            return [FilesRead(order.number, good, seconds)]
        self._files[order.block_hash] = None
        found: list[TierEvent] = [FileWritten(order.block_hash, order.block, True)]
        if len(self._files) > self._most:
            fewer = max(1, int(KEPT_FILES * self._most))
            went = tuple(itertools.islice(self._files, len(self._files) - fewer))
            for block_hash in went:
                del self._files[block_hash]
            found.append(FilesSeen((), went))
        return found
