"""SimulatedDisk: the KV tier's files in virtual time. Asked by a simulated engine.

What is written and read, and whether to read at all, is decided by the scheduler's own tiers
(engine/decide/kv_tiers.py); here is only how long it takes. Like the mover's (play/disk_tier.py), one thread
writes and another reads, one order after the other, and no step waits for them.
"""

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
    WriteFile,
)
from cumulo.errors import ConfigError


class SimulatedDisk:
    def __init__(self, read_s: float, write_s: float, most_blocks: int) -> None:
        """Seconds for one block, and how many blocks there is room for."""
        if most_blocks < 1:
            raise ConfigError("the disk tier has no room for a single KV block: give it more GiB")
        self._read_s, self._write_s, self._most = read_s, write_s, most_blocks
        self._files: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._free_s = {ReadFiles: 0.0, WriteFile: 0.0}  # from when on the reader and the writer have time

    def _seconds(self, order: TierOrder) -> float:
        return self._read_s * len(order.blocks) if isinstance(order, ReadFiles) else self._write_s

    def done_s(self, order: TierOrder, now_s: float) -> float:
        """When an order that is given now is done, behind those before it."""
        done_s = self._free_s[type(order)] = max(self._free_s[type(order)], now_s) + self._seconds(order)
        return done_s

    def carry_out(self, order: TierOrder) -> list[TierEvent]:
        if isinstance(order, ReadFiles):
            good = tuple(block_hash in self._files for block_hash in order.hashes)
            for block_hash in order.hashes:
                if block_hash in self._files:
                    self._files.move_to_end(block_hash)
            return [FilesRead(order.number, good, self._seconds(order))]
        self._files[order.block_hash] = None
        found: list[TierEvent] = [FileWritten(order.block_hash, order.block, True)]
        if len(self._files) > self._most:
            fewer = max(1, int(KEPT_FILES * self._most))
            went = tuple(itertools.islice(self._files, len(self._files) - fewer))
            for block_hash in went:
                del self._files[block_hash]
            found.append(FilesSeen((), went))
        return found
