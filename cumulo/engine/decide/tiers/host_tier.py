"""Host memory as a tier of the KV cache: which prefix blocks lie there, and whether fetching blocks is worth it.
Used by Tiers.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from cumulo.engine.decide.core.block_pool import BlockHash

_LEARN = 0.2


@dataclass(slots=True)
class TierCosts:
    """Measured while the engine runs; the starting value matters only before the first block is read."""

    disk_s_per_block: float = 2e-3

    def observe_disk(self, blocks: int, seconds: float) -> None:
        if blocks and seconds > 0:
            self.disk_s_per_block += _LEARN * (seconds / blocks - self.disk_s_per_block)


@dataclass(frozen=True, slots=True)
class FetchChoice:
    fetch: bool
    fetch_s: float
    compute_s: float


def choose_fetch(
    *, blocks: int, block_size: int, move_s_per_block: float, compute_s_per_token: float, ahead_s: float = 0.0
) -> FetchChoice:
    """A run of blocks is fetched if that is sooner than computing it. `ahead_s`: what is fetched before."""
    fetch_s = ahead_s + blocks * move_s_per_block
    compute_s = blocks * block_size * compute_s_per_token
    return FetchChoice(fetch_s < compute_s, fetch_s, compute_s)


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
